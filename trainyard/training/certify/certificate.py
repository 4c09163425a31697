"""The certificate of a run: the checks, and the first broken link.

    {"format_version": 1, "verdict": "proven", "complete": true, "lineage": "9c1e...",
     "finished": true, "first_step": 1, "last_step": 500, "of_steps": 500, "train_samples": 4000,
     "tokens": 512000, "begins_at": "initial weights", "ledger_digest": "5f0b...",
     "published_steps": [100, 200, 300, 400, 500],
     "spans": [{"first_step": 1, "last_step": 200, "data_parallel_size": 4, "micro_batch_size": 2},
               {"first_step": 201, "last_step": 500, ...}],
     "course_changes": [{"first_step": 401, "options": {"train_iters": 500}}],
     "checks": [{"name": "steps", "what": "...", "result": "proven", "checked": 500, "note": ""}],
     "first_broken_link": null, "remarks": []}

`checked` counts steps, files under "files", published steps under "state". A broken link is
{"step": 7, "check": "samples", "expected": "...", "found": "...", "where": "iter_0000010"}. Equal
runs have equal certificates, in every location. Pure: documents, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from trainyard.training.run.dp_history import DpSpan

FORMAT_VERSION = 1

Result = Literal["proven", "broken", "not checked"]

CHECKS = {
    "steps": "steps follow each other, none missing, none twice",
    "ledger": "the digest of the ledger is the one that each checkpoint records",
    "position": "samples and tokens grow by the batch of each step",
    "samples": "each step had the samples that the order of the data gives",
    "rng": "each step used the seeds that its position in the run gives",
    "rates": "learning rate and weight decay follow the schedule",
    "loss_scale": "the scale of the loss follows the overflows",
    "validation": "the validation loss was measured after the steps that the options name",
    "state": "position, updates and schedule in each checkpoint are those of its step",
    "files": "files are those that the manifests list",
}
"""The checks, in the order in which broken links of one step are reported."""


class Link(NamedTuple):
    """A check that failed."""

    step: int
    check: str
    expected: str
    found: str
    where: str
    """Folder or file of the run."""

    @property
    def text(self) -> str:
        """The certificate as text for people."""
        return (
            f"step {self.step}, {self.check} ({self.where}): expected {self.expected}, found "
            f"{self.found}"
        )


class CourseChange(NamedTuple):
    """A change of options in the middle of a run."""

    first_step: int
    """The first step under the new options."""
    options: dict[str, Any]
    """The new values of those that changed."""


@dataclass(slots=True)
class Check:
    """The progress and result of one check."""

    name: str
    checked: int = 0
    broken: Link | None = None
    """The first broken link."""
    reason: str = ""
    """Why the check is incomplete or missing."""

    @property
    def result(self) -> Result:
        """The outcome. A partial check is proven within the limits of `reason`."""
        if self.broken is not None:
            return "broken"
        return "proven" if self.checked else "not checked"

    def compare(
        self, step: int, expected: object, found: object, where: str, holds: bool | None = None
    ) -> None:
        """Compare one item, and keep the first broken link. Of tables it shows only the
        differences."""
        self.checked += 1
        if (expected == found) if holds is None else holds:
            return
        if isinstance(expected, dict) and isinstance(found, dict):
            names = [name for name in expected if expected[name] != found.get(name)]
            expected, found = ({name: of.get(name) for name in names} for of in (expected, found))
        if self.broken is None or step < self.broken.step:
            self.broken = Link(step, self.name, str(expected), str(found), where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of all checks."""

    lineage: str
    finished: bool
    first_step: int
    last_step: int
    of_steps: int
    """Steps of the whole run."""
    train_samples: int
    """Consumed up to the last step, including those of the run that it started from."""
    tokens: int
    begins_at: str
    ledger_digest: str
    published_steps: tuple[int, ...]
    spans: tuple[DpSpan, ...]
    course_changes: tuple[CourseChange, ...] = ()
    checks: tuple[Check, ...]
    remarks: tuple[str, ...] = field(default=())
    """Files in the folder that do not belong to this run."""

    @property
    def first_broken_link(self) -> Link | None:
        """The broken link of the earliest step."""
        order = list(CHECKS)
        links = [check.broken for check in self.checks if check.broken is not None]
        return min(links, key=lambda link: (link.step, order.index(link.check)), default=None)

    @property
    def is_proven(self) -> bool:
        """Whether no check is broken."""
        return self.first_broken_link is None

    @property
    def is_complete(self) -> bool:
        """Whether all checks are complete."""
        return not any(check.reason for check in self.checks)

    def document(self) -> dict[str, Any]:
        """JSON-able."""
        link = self.first_broken_link
        return {
            "format_version": FORMAT_VERSION,
            "verdict": "proven" if self.is_proven else "broken",
            "complete": self.is_complete,
            "lineage": self.lineage,
            "finished": self.finished,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "of_steps": self.of_steps,
            "train_samples": self.train_samples,
            "tokens": self.tokens,
            "begins_at": self.begins_at,
            "ledger_digest": self.ledger_digest,
            "published_steps": list(self.published_steps),
            "spans": [span._asdict() for span in self.spans],
            "course_changes": [change._asdict() for change in self.course_changes],
            "checks": [_check_document(check) for check in self.checks],
            "first_broken_link": None if link is None else link._asdict(),
            "remarks": list(self.remarks),
        }

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        link = self.first_broken_link
        if link is not None:
            return f"broken: {link.text}"
        what = (
            f"steps {self.first_step} to {self.last_step} follow each other, up to "
            f"{self.train_samples} samples, none lost and none repeated"
        )
        unchecked = [check.name for check in self.checks if check.reason]
        return f"proven: {what}" + (f"; not all checked: {listed(unchecked)}" if unchecked else "")


def _check_document(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "what": CHECKS[check.name],
        "result": check.result,
        "checked": check.checked,
        "note": check.reason,
    }


def listed(names: Sequence[object]) -> str:
    """`a, b and c`."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last
