"""The course of a run: the options that may change in the middle of it, and since which step.

A run goes on in its folder under other rates, another length, batch size or validation. Each step
records the segments up to itself in the `run` of its manifest, which no digest covers:

    "run": {"segments": [{"first_step": 1, "last_step": 40, "course": {"train_iters": 40, ...},
                          "schedule": {"learning_rate": {...}, ...}}, ...]}

The first line of a segment in the ledger has what changed, under `course`. Standard library only,
apart from manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join
from trainyard.checkpoint.steps import step_folder
from trainyard.config import flag
from trainyard.errors import ArtifactError

KEY = "segments"


class Segment(NamedTuple):
    """Consecutive steps, both ends included, under the same course."""

    first_step: int
    last_step: int
    course: Mapping[str, Any]
    """The options, as in `config.json`."""
    schedule: Mapping[str, Any]
    """The rates, as in `state.json`: of the options, or of the checkpoint that the run resumed
    from."""


@dataclass(frozen=True, slots=True)
class Course:
    """The present course of a run, and the segments before it."""

    options: Mapping[str, Any]
    schedule: Mapping[str, Any]
    before: tuple[Segment, ...] = ()

    def up_to(self, first_step: int, last_step: int) -> tuple[Segment, ...]:
        """The segments up to `last_step`; those from `first_step` on have the present course."""
        if last_step < first_step:
            return self.before
        new = Segment(first_step, last_step, self.options, self.schedule)
        last = self.before[-1] if self.before else None
        if last is not None and last[2:] == new[2:] and last.last_step + 1 == first_step:
            return (*self.before[:-1], last._replace(last_step=last_step))
        return (*self.before, new)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `now` that differ. An option that an older version did not have is none."""
    return {name: value for name, value in now.items() if before.get(name, value) != value}


def described(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The changes for people: `--lr 0.001 -> 0.002, ...`."""
    named = changes(before, now)
    return ", ".join(f"{flag(n)} {before[n]!r} -> {value!r}" for n, value in named.items())


# --- documents ----------------------------------------------------------------------------------


def segments_document(segments: Sequence[Segment]) -> dict[str, Any]:
    """The entry in the manifest of a step."""
    return {KEY: [segment._asdict() for segment in segments]}


def segments_of_step(root_url: str, step: int) -> tuple[Segment, ...]:
    """The segments up to this step, as far as they are recorded."""
    found = read_manifest(join(root_url, step_folder(step), MANIFEST))
    return parse_segments(found[0].run) if found is not None else ()


def parse_segments(run: Mapping[str, Any]) -> tuple[Segment, ...]:
    """The segments in the `run` of a manifest; empty if it has none."""
    try:
        segments = tuple(Segment(**entry) for entry in run.get(KEY, ()))
        sound = all(type(n) is int and n > 0 for one in segments for n in one[:2])
        sound &= all(isinstance(part, dict) for one in segments for part in one[2:])
        sound &= all(one.first_step <= one.last_step for one in segments)
        sound &= all(a.last_step < b.first_step for a, b in pairwise(segments))
    except (TypeError, AttributeError):
        sound, segments = False, ()
    if not sound:
        raise ArtifactError(f"the manifest of a step has invalid {KEY}: {run.get(KEY)!r}")
    return segments


# --- where a run goes on ------------------------------------------------------------------------


def last_course(
    manifest: Manifest, config: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """(options, schedule) of the last step before a checkpoint. config, state: its documents.
    Empty or None if they are not recorded, as in a converted checkpoint."""
    segments = parse_segments(manifest.run)
    if segments:
        return segments[-1].course, segments[-1].schedule
    return config.get("run") or {}, state.get("schedule")


def ledger_entry(
    options: Mapping[str, Any], schedule: Mapping[str, Any] | None, course: Course
) -> dict[str, Any] | None:
    """`course` in the first line of a segment: the changed options, and the rates if they change.
    None if nothing does. options, schedule: of the step before."""
    changed = changes(options, course.options)
    has_new_rates = schedule is not None and schedule != course.schedule
    if not changed and not has_new_rates:
        return None
    return {"options": changed, **({"schedule": dict(course.schedule)} if has_new_rates else {})}
