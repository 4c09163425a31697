"""The record of a run for stages.certify and stages.blame: options, checkpoints with their ledger
lines, start, token files. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainyard.artifacts.inputs import Manifests, resolve
from trainyard.artifacts.manifest import Manifest
from trainyard.datasets.config import DataConfig
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.schedule import OptimizerSchedule
from trainyard.training.loop.length import RunLength, length_of
from trainyard.training.options.training import TrainingConfig
from trainyard.training.run.dp_history import DpSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseRecord:
    """What decides the steps of one segment of a run."""

    training: TrainingConfig
    optimizer_schedule: OptimizerSchedule
    precision: PrecisionConfig
    first_step: int = 1
    last_step: int | None = None
    """None: all that follow."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The course as the run recorded it; empty if it recorded none."""

    def length(self, dp: int, seq_length: int) -> RunLength:
        """The length of the run under this course, on this many data-parallel ranks."""
        return length_of(self.training, dp, seq_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The options and the history of a run."""

    lineage: str
    seq_length: int
    courses: tuple[CourseRecord, ...]
    """The segments of the run, in order; at least one."""
    spans: tuple[DpSpan, ...] = ()
    """The number of data-parallel ranks of its steps, from the last checkpoint."""
    finished: bool = False

    @property
    def seed(self) -> int:
        """The seed of all steps."""
        return self.courses[-1].training.seed

    def course(self, step: int) -> CourseRecord:
        """The course of a step; the last one also of those after the record."""
        for course in self.courses:
            if course.last_step is None or step <= course.last_step:
                return course
        return self.courses[-1]

    def length(self, course: CourseRecord) -> RunLength:
        """The length of the run under a course, at its start."""
        span = self.span(course.first_step) or (self.spans[0] if self.spans else None)
        return course.length(1 if span is None else span.data_parallel_size, self.seq_length)

    def span(self, step: int) -> DpSpan | None:
        """The span of a step; None if it is not recorded."""
        return next((s for s in self.spans if s.first_step <= step <= s.last_step), None)


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """A checkpoint, as evidence of the run."""

    step: int
    where: str
    """Its folder, for messages."""
    lines: Sequence[str]
    """Lines of its ledger: steps since the permanent checkpoint before."""
    state: Mapping[str, Any]
    stays: bool
    lines_fault: str = ""
    """Why some of its lines are unreadable."""
    state_fault: str = ""
    """Why its state is unreadable; `state` is empty then."""


@dataclass(slots=True)
class Position:
    """Where a run is after a step; the fields are those of TrainState."""

    step: int = 0
    consumed_train_samples: int = 0
    scheduled_samples: int = 0
    num_updates: int = 0

    def advance(self, size: int, has_update: bool) -> None:
        """Advance by one step."""
        self.step += 1
        self.consumed_train_samples += size
        self.scheduled_samples += size if has_update else 0
        self.num_updates += has_update


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a run."""

    position: Position = field(default_factory=Position)
    ledger_digest: str | None = ""
    """None: unknown."""
    loss_scaler: Mapping[str, Any] | None = field(default_factory=dict)
    """None: unknown."""
    description: str = "initial weights"
    gap: str = ""
    """Why the checkpoint that it started from is not available."""


def start_before(first: PublishedStep, gap: str) -> RunStart:
    """The start of a run, derived from its first checkpoint. Less is known than from the checkpoint
    that it started from."""
    records = [parse_line(line, first.where) for line in first.lines]
    state = Position(**{name: int(first.state[name]) for name in asdict(Position())})
    pending = first.state.get("unmeasured")
    for record in [*records, *([pending] if pending else [])]:
        if record["step"] == 0:
            continue
        size, updated = int(record["global_batch_size"]), has_update(record)
        state.step -= 1
        state.consumed_train_samples -= size
        state.scheduled_samples -= size if updated else 0
        state.num_updates -= updated
    return RunStart(state, None, None, f"step {state.step} of another run", gap)


def parse_line(text: str, where: str) -> dict[str, Any]:
    """A line of a ledger; ArtifactError if it is invalid."""
    try:
        record = json.loads(text)
        if not isinstance(record, dict) or type(record["step"]) is not int or record["step"] < 0:
            raise ValueError("no step number")
    except (ValueError, KeyError, RecursionError) as error:
        raise ArtifactError(
            f"{where}: a line of the ledger is not a step: {text[:60]!r} ({error})"
        ) from error
    return record


def has_update(record: Mapping[str, Any]) -> bool:
    """Whether the step updated the parameters."""
    return not (record.get("skipped") or record.get("passed_over"))


LOAD = "load"
"""Name of the input of `pretrain` for the checkpoint of --load."""

INPUT = re.compile(r"(data|train|valid|test)_(\d+)(?: \(weight (.+)\))?")
"""Name of an input of `pretrain` for a prefix of token files, from `DataConfig.inputs`."""


def named_token_files(manifest: Manifest) -> dict[str, list[str]]:
    """Locations of the token files of a finished run, as values of `data_path`, `train_data_path`
    and so on; {} for a run without any."""
    named = [
        (match, record)
        for name, record in manifest.inputs.items()
        if (match := INPUT.fullmatch(name))
    ]
    paths: dict[str, list[str]] = {}
    for match, record in sorted(named, key=lambda found: int(found[0][2])):
        kind = "data_path" if match[1] == "data" else f"{match[1]}_data_path"
        paths.setdefault(kind, []).extend([*([match[3]] if match[3] else []), *record.urls])
    return paths


def check_token_files(data: DataConfig, made_of: Mapping[str, str], option: str, skip: str) -> None:
    """Refuse token files other than those of the run in `option`.

    made_of: digest of each input of the run. skip: the flag that skips this check."""
    manifests = Manifests()
    for name, urls in data.inputs().items():
        if name not in made_of:
            raise ConfigError(
                f"--data-path: the run of {option} has no input {name}; give its prefixes and "
                f"weights, in its order: {', '.join(n for n in made_of if INPUT.fullmatch(n))}"
            )
        if resolve(name, urls, manifests).digest != made_of[name]:
            raise DataError(
                f"{', '.join(urls)}: not the token files of the run of {option} "
                f"(input {name} has another digest); give {skip} to continue anyway"
            )
