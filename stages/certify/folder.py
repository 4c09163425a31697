"""Reads a run folder: the run to certify, its checkpoints, and what belongs to other runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_digest
from trainyard.artifacts.manifest import Manifest, read_listed_json, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, join
from trainyard.checkpoint.steps import CONFIG, STATE, locate_step, step_folder, step_of
from trainyard.config import from_dict, leaves
from trainyard.errors import ArtifactError, ConfigError
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.schedule_resume import stored_optimizer_schedule
from trainyard.progress import Progress
from trainyard.training.certify.certificate import Check, listed
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.options.training import TrainingConfig
from trainyard.training.run.dp_history import DpSpan, parse_spans
from trainyard.training.run.run_record import (
    CourseRecord,
    PublishedStep,
    RunRecord,
    parse_line,
)
from trainyard.training.run.segments import Segment, parse_segments

FORMAT_VERSION = 1
"""Of the documents of a checkpoint."""

STAYS = "stays"
"""Key of state.json: false for a step that is saved only to resume from."""

SUPERSEDED = "superseded/"
"""Folder of the steps of other runs that were set aside."""

OPTION = "the run"


def _only(options: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    names = {name for name, _, _ in leaves(config_class)}
    return {name: value for name, value in options.items() if name in names}


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A checkpoint of the run."""

    number: int
    manifest: Manifest | None
    """None when it cannot be read, so that the run of the step is unknown."""
    fault: str = ""
    """The reason why its manifest cannot be read."""

    @property
    def folder(self) -> str:
        """Its name in the run folder."""
        return step_folder(self.number)


class CertifiedRun:
    """One run in a folder: the finished one, else the run of the highest step.

    A file of it that cannot be read is a broken link of the check "files"."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError without a checkpoint, ArtifactError if none can be read."""
        self.url = url.rstrip("/") or url
        if step_of(basename(self.url)) is not None:
            raise ConfigError(f"{url}: this is one step; give the folder of the run, above it")
        self._sizes = store.list_files(self.url)
        self._faults: list[tuple[int, str, str]] = []
        """(step, path, reason) of documents that cannot be read."""
        every = list(self._found_steps())
        whole = [step for step in every if step.manifest is not None]
        if not every:
            locate_step(url, OPTION)  # its error names what the folder holds instead
        if not whole:
            raise ArtifactError(f"{url}: none of its manifests can be read: {every[-1].fault}")
        self.manifest, fault = self._manifest_at(MANIFEST)
        """Of a finished run."""
        if fault:
            self._faults.append((every[-1].number, MANIFEST, fault))
        latest = self.manifest or whole[-1].manifest
        assert latest is not None
        self.lineage = latest.lineage
        others = [s for s in whole if s.manifest is not None and s.manifest.lineage != self.lineage]
        self._others = others
        self.steps = [step for step in every if step not in others]
        if len(others) == len(whole):
            raise ArtifactError(
                f"{url}: none of its steps belongs to the finished run of its {MANIFEST} "
                f"({listed([step.folder for step in whole])} belong to another run)"
            )
        for step in self.steps:
            if step.fault:
                self._faults.append((step.number, f"{step.folder}/{MANIFEST}", step.fault))

    def _found_steps(self) -> Iterator[FoundStep]:
        """The steps that have a manifest, ascending."""
        for folder in self._folders():
            number = step_of(folder)
            assert number is not None
            manifest, fault = self._manifest_at(f"{folder}/{MANIFEST}")
            if manifest is not None or fault:
                yield FoundStep(number, manifest, fault)

    def _manifest_at(self, path: str) -> tuple[Manifest | None, str]:
        """A manifest, and the reason why it cannot be read; neither if there is no such file, or if
        it is being replaced."""
        try:
            found = read_manifest(join(self.url, path))
        except ArtifactError as error:
            return None, self._reason(error)
        return (None if found is None else found[0]), ""

    def _folders(self) -> list[str]:
        names = {name.split("/")[0] for name in self._sizes if "/" in name}
        numbers = sorted(n for name in names if (n := step_of(name)) is not None)
        return [step_folder(number) for number in numbers]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What belongs to other runs, or to no run."""
        remarks = []
        if self._others:
            names = listed([step.folder for step in self._others])
            remarks.append(f"{names}: of another run, with other options or data")
        known = {step.folder for step in (*self.steps, *self._others)}
        torn = [name for name in self._folders() if name not in known]
        if torn:
            remarks.append(f"{listed(torn)}: no {MANIFEST}, so the save did not finish")
        aside = {n.rpartition("/")[0] for n in self._sizes if n.startswith(SUPERSEDED)}
        count = sum(step_of(basename(folder)) is not None for folder in aside)
        if count:
            steps = "1 step" if count == 1 else f"{count} steps"
            remarks.append(f"{SUPERSEDED} holds {steps} of other runs, set aside")
        return tuple(remarks)

    # --- documents ------------------------------------------------------------------------------

    def document(self, step: FoundStep, name: str) -> dict[str, Any]:
        """A document of a step. Raises ArtifactError for another format version."""
        url = join(self.url, step.folder, name)
        record = None if step.manifest is None else step.manifest.record(name)
        document: dict[str, Any] = read_listed_json(url, record)
        if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
            raise ArtifactError(f"{url}: not a document of format_version {FORMAT_VERSION}")
        return document

    @cached_property
    def _last_readable(self) -> tuple[FoundStep, Manifest, dict[str, Any], dict[str, Any]]:
        """The last step that can be read, its manifest, config.json and state.json."""
        reason = ""
        for step in reversed(self.steps):
            if step.manifest is None:
                continue
            try:
                state = self.document(step, STATE)
            except ArtifactError as error:  # a broken link of the check "state"
                reason = reason or str(error)
                continue
            try:
                return step, step.manifest, self.document(step, CONFIG), state
            except ArtifactError as error:
                reason = reason or str(error)
                self._faults.append((step.number, f"{step.folder}/{CONFIG}", self._reason(error)))
        raise ArtifactError(f"{self.url}: none of its steps can be read: {reason}")

    def _reason(self, error: ArtifactError) -> str:
        """The message without the URL of the run: equal runs have equal certificates."""
        return str(error).replace(join(self.url, ""), "")

    @property
    def made_of(self) -> dict[str, Any]:
        """config.json of the last step."""
        return self._last_readable[2]

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options that identify the run."""
        options: dict[str, Any] = self.made_of["run"]
        return options

    def options_of(self, config_class: type) -> dict[str, Any]:
        """The options of one configuration class."""
        return _only(self.options, config_class)

    def facts(self) -> RunRecord:
        """The facts that decide the links of the run. Raises ArtifactError if its documents lack
        them."""
        last, manifest, _, state = self._last_readable
        try:
            spans = parse_spans(manifest.run)
            segments = parse_segments(manifest.run)
            size = state["global_batch_size"]
            courses = tuple(self._course(segment, spans) for segment in segments)
            if not courses:
                courses = (self._course(Segment(1, 0, {}, state["schedule"]), spans, size),)
            elif courses[-1].options.get("global_batch_size") is None:
                courses = (*courses[:-1], self._course(segments[-1], spans, size))
            return RunRecord(
                lineage=self.lineage,
                seq_length=int(self.options["seq_length"]),
                courses=(*courses[:-1], replace(courses[-1], last_step=None)),
                spans=spans,
                finished=self.manifest is not None,
            )
        except (KeyError, TypeError, StopIteration, ConfigError) as error:
            raise ArtifactError(
                f"{join(self.url, last.folder)}: {STATE} and {CONFIG} are not of a training run "
                f"({error}); a checkpoint alone, such as a converted one, has nothing to certify"
            ) from error

    def _course(
        self, segment: Segment, spans: Sequence[DpSpan], global_batch_size: int | None = None
    ) -> CourseRecord:
        """The course of a segment. global_batch_size: if no option gave it; unset: that of the
        layout at its start."""
        options = {**self.options, **segment.course}
        size = options.get("global_batch_size") or global_batch_size
        if size is None:
            span = next(s for s in spans if s.first_step <= segment.first_step <= s.last_step)
            size = span.data_parallel_size * span.micro_batch_size
        options["global_batch_size"] = size
        where = "the options of the run"
        return CourseRecord(
            training=from_dict(TrainingConfig, _only(options, TrainingConfig), where),
            optimizer_schedule=stored_optimizer_schedule(segment.schedule),
            precision=from_dict(PrecisionConfig, _only(options, PrecisionConfig), where),
            first_step=segment.first_step,
            last_step=segment.last_step,
            options=segment.course,
        )

    def published(self, step: FoundStep) -> PublishedStep:
        """A checkpoint with the readable lines of its ledger."""
        if step.fault:
            return PublishedStep(step.number, step.folder, (), {}, False, lines_fault=step.fault)
        lines, lines_fault = self._lines(step)
        try:
            state, fault = self.document(step, STATE), ""
        except ArtifactError as error:
            state, fault = {}, self._reason(error)
        stays = bool(state.get(STAYS, not fault))
        return PublishedStep(step.number, step.folder, lines, state, stays, lines_fault, fault)

    def _lines(self, step: FoundStep) -> tuple[list[str], str]:
        """The lines of a ledger before the first invalid one, and why that one is invalid."""
        where = join(self.url, step.folder, LEDGER)
        lines: list[str] = []
        try:
            for line in store.read_bytes(where).decode("ascii").splitlines():
                parse_line(line, where)
                lines.append(line)
        except UnicodeDecodeError as error:
            return [], f"{step.folder}/{LEDGER}: not the text of a ledger: {error}"
        except ArtifactError as error:
            return lines, self._reason(error)
        return lines, ""

    @cached_property
    def first_readable(self) -> PublishedStep:
        """The first checkpoint that can be read completely, else the first one."""
        every = (self.published(step) for step in self.steps)
        whole = (step for step in every if not step.lines_fault and not step.state_fault)
        return next(whole, None) or self.published(self.steps[0])

    def whole_ledger(self) -> bytes | None:
        """The ledger of a finished run."""
        if self.manifest is None or LEDGER not in self._sizes:
            return None
        return store.read_bytes(join(self.url, LEDGER))

    # --- files ----------------------------------------------------------------------------------

    def total_bytes(self) -> int:
        """Size of all files that the manifests list."""
        return sum(record.size_bytes for _, _, record in self._listed())

    def check_files(self, digests: bool, progress: Progress) -> Check:
        """Compare sizes, and digests if requested, with the manifests."""
        check = Check("files")
        self._compare_parts(check)
        for number, path, fault in self._faults:
            check.compare(number, "the published file", fault, path)
        seen: dict[str, str] = {}
        for step, path, record in self._listed():
            size = self._sizes.get(path)
            progress.update(record.size_bytes)
            if size is None or size != record.size_bytes:
                found = "no such file" if size is None else f"{size} bytes"
                check.compare(step, f"{record.size_bytes} bytes", found, path)
            elif digests:
                if path not in seen:
                    seen[path] = read_digest(join(self.url, path))
                check.compare(step, record.digest, seen[path], path)
            else:
                check.checked += 1
        return check

    def _compare_parts(self, check: Check) -> None:
        """Compare the steps that the run names with the manifests of these steps."""
        published = {step.folder: step for step in self.steps if step.manifest is not None}
        for part in self.manifest.parts if self.manifest is not None else ():
            step = published.get(part.path)
            found = "no such step" if step is None or step.manifest is None else ""
            if step is not None and step.manifest is not None:
                found = step.manifest.output_digest
            number = step_of(part.path) or 0
            check.compare(number, part.output_digest, found, f"{part.path}/{MANIFEST}")

    def _listed(self) -> Iterator[tuple[int, str, store.FileRecord]]:
        """(step, path in the run folder, record); files of the run itself have its last step."""
        for step in self.steps:
            for record in step.manifest.files if step.manifest is not None else ():
                yield step.number, f"{step.folder}/{record.path}", record
        for record in self.manifest.files if self.manifest is not None else ():
            yield self.steps[-1].number, record.path, record
