"""Saves steps, and removes those that newer steps replace.

A step at --save-interval and the last step stay; with --save-retain-interval only its multiples
and the last. Any other step, such as one saved on a request to stop, is temporary: the run can
resume from it, and it is removed once newer steps are published. So a run that was stopped ends
with the same files as one that was not. The next step that stays repeats its ledger lines.

With asynchronous saves an update waits only for a copy to host memory, which runs during the
forward and backward passes before it. The run always waits for the save of its last step. A save
waits for the one before. Non-persistent steps, saved elsewhere between these, are temporary too."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import BackgroundSave, SaveReport
from trainyard.checkpoint.handover import find_places
from trainyard.checkpoint.host_room import tightest_host
from trainyard.checkpoint.layout import LocalTensors
from trainyard.checkpoint.model_tensors import model_tensors
from trainyard.checkpoint.plan import Slice
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import StepContents, prepare_step, share_of_rank, write_step
from trainyard.checkpoint.steps import remove_step, step_folder
from trainyard.errors import HostMemoryError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import TrainModule
from trainyard.training.run.dp_history import DpSpan, spans_document, with_steps
from trainyard.training.run.node_local_saving import Done, NonPersistentPlan, NonPersistentSaves
from trainyard.training.run.run_steps import STAYS
from trainyard.training.run.segments import Course, segments_document
from trainyard.training.run.tensors import optimizer_tensors, scaling_tensors

log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 120.0
"""How long a failed run waits for a step that is being written."""


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """The folder of the steps, and the documents and files in each step."""

    url: str
    lineage: str
    stage_name: str
    documents: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, bytes]


class Checkpointing(Callback):
    """Saves on all ranks together."""

    def __init__(
        self,
        target: SaveTarget,
        train_module: TrainModule,
        interval: int | None,
        *,
        retain_interval: int | None = None,
        keep_last: int = 1,
        micro_batch_size: int,
        save_optimizer: bool = True,
        facts: Mapping[str, Any],
        staying: tuple[int, ...] = (),
        passing: tuple[int, ...] = (),
        spans: tuple[DpSpan, ...] = (),
        course: Course | None = None,
        before_first: Callable[[], None] = lambda: None,
        background: BackgroundSave | None = None,
        needs_room: bool = False,
        non_persistent: Callable[[Done], NonPersistentPlan] | None = None,
        report: Callable[[SaveReport], object] = lambda report: None,
    ) -> None:
        """retain_interval: of the steps at `interval`, its multiples stay; None: all.
        keep_last: number of newest steps to keep. facts: further entries of `state.json`.
        staying, passing: existing steps that stay, and temporary ones. spans: the number of
        data-parallel ranks of earlier steps. course: the options of the steps to come.

        before_first: called on rank 0 before the first save. background: writes steps while the run
        trains; None: the run waits. needs_room: it waits too where a host lacks memory for
        copies, which is an error otherwise. non_persistent: builds the saves outside the run
        folder, given the callback for steps copied from there. report: called on rank 0 with
        the cost of a save, from any thread."""
        self._target = target
        self._train_module = train_module
        self._interval = interval
        self._retain_interval = retain_interval or interval
        self._micro_batch_size = micro_batch_size
        self._save_optimizer = save_optimizer
        self._facts = facts
        self._retention = Retention(keep_last, staying, passing)
        self._spans = spans
        self._course = course
        self._first_step = 1
        self._saved_step: int | None = None
        self._before_first: Callable[[], None] | None = before_first
        self._background = background
        self._needs_room = needs_room and background is not None
        groups = train_module.groups
        ranks = Ranks(groups.world, groups.rank, groups.dims.world_size)
        placed = find_places(ranks)
        # Ranks of one host have few files, and write them faster side by side.
        self._ranks = placed if len(set(placed.places or ())) > 1 else ranks
        self._report = report
        self._unpublished_lines = b""
        """Ledger lines of a step that stays and is not published yet."""
        self._non_persistent: NonPersistentSaves | None = None
        if non_persistent is not None:
            plan = non_persistent(partial(self._published, False))
            self._non_persistent = NonPersistentSaves(plan, self._ranks, self._log_save)
        self.reports: list[SaveReport] = []
        """One for each saved step, on rank 0."""

    def begin(self, state: TrainState) -> None:
        """Start a new span of steps on these ranks, and allocate host memory."""
        self._first_step = state.step + 1
        self._saved_step = None
        self._train_module.optimizer.before_update = self._hold_update
        if self._background is None:
            return
        share = share_of_rank(self._tensors(), self._ranks)
        if not self._needs_room:
            self._reserve(share)
            return
        self._needs_room = False
        if (reason := self._lack_of_room(share)) is not None:
            self._background = None
            if self._non_persistent is not None:
                self._non_persistent.wait_for_saves()
            if self._ranks.rank == 0:
                log.info("saves are synchronous: %s", reason)

    def _reserve(self, share: Mapping[Slice, torch.Tensor]) -> None:
        if self._background is not None:
            self._background.reserve(share)
        if self._non_persistent is not None:
            self._non_persistent.reserve(share)

    def _lack_of_room(self, share: Mapping[Slice, torch.Tensor]) -> str | None:
        """Reserve memory for copies, or say why there is none on some host; alike on all ranks."""
        num_copies = 1 + (self._non_persistent is not None)
        size = num_copies * sum(part.size_bytes for part in share)
        room = tightest_host(size, self._ranks)
        if not room.is_enough:
            return f"copies would take {room}"

        def reserve() -> str | None:
            try:
                self._reserve(share)
            except HostMemoryError as error:
                return str(error)
            return None

        failures = [failure for failure in self._ranks.gather(reserve) if failure is not None]
        if not failures and self._ranks.rank == 0:
            log.info("saves are asynchronous: copies take %s", room)
        return next(iter(failures), None)

    def after_step(self, event: StepEvent) -> None:
        """Save if a save is due."""
        if self._background is not None:
            self._background.check()
        if self._non_persistent is not None:
            self._non_persistent.check()
        step = event.record.step
        if step == self._saved_step:
            self._finish()  # the second event of a step: it is saved, with its ledger line
            return
        is_due = event.is_measured and (event.is_last or _divides(self._interval, step))
        stays = is_due and (event.is_last or _divides(self._retain_interval, step))
        if step > 0 and (is_due or event.is_stopping):
            self._save(event, stays)
        elif step > 0 and event.is_measured:
            self._save_non_persistent(event)

    def end(self) -> None:
        """Wait for saves that are being written."""
        self._finish()
        if self._non_persistent is not None:
            self._non_persistent.finish()

    def failed(self) -> None:
        """Give a step that is being written time to become complete."""
        if self._background is not None:
            self._background.give_up(GIVE_UP_SECONDS)
        if self._non_persistent is not None:
            self._non_persistent.give_up(GIVE_UP_SECONDS)

    def _finish(self) -> None:
        if self._background is not None and (seconds := self._background.finish()) > 1.0:
            log.info("waited for the previous save seconds=%.1f", seconds)

    def _save(self, event: StepEvent, stays: bool) -> None:
        began = time.monotonic()
        self._finish()
        is_final = event.is_stopping or event.is_last
        if is_final and self._non_persistent is not None:
            self._non_persistent.finish()
        self._saved_step = event.state.step
        self._train_module.optimizer.finish_parameters()
        self._make_room()
        contents = self._contents(event, stays)
        prepared = prepare_step(
            self._target.url, event.state.step, self._tensors(), contents.lineage, self._ranks
        )
        if stays:
            self._unpublished_lines = event.ledger.text()
            event.ledger.forget()
        done = partial(self._published, stays)
        if self._background is not None and not is_final:
            self._background.start(prepared, contents, began, done)
            return
        records = write_step(prepared, contents, self._ranks)
        seconds = time.monotonic() - began
        size = sum(record.size_bytes for record in records)
        done(records, SaveReport(event.state.step, size, seconds, seconds))

    def _hold_update(self) -> None:
        """Wait for copies of the parameters before they change."""
        if self._background is not None:
            self._background.hold_update()
        if self._non_persistent is not None:
            self._non_persistent.hold_update()

    def _save_non_persistent(self, event: StepEvent) -> None:
        if self._non_persistent is None or not self._non_persistent.is_due(event.record.step):
            return
        self._train_module.optimizer.finish_parameters()
        if self._non_persistent.needs_room:
            self._make_room()
        contents = self._contents(event, stays=False)
        self._non_persistent.save(event.state.step, self._tensors(), contents)

    def _make_room(self) -> None:
        if self._ranks.rank == 0 and self._before_first is not None:
            self._before_first()
        self._before_first = None

    def _contents(self, event: StepEvent, stays: bool) -> StepContents:
        return StepContents(
            state={**self._facts, **event.state.state_dict(), STAYS: stays},
            documents=self._target.documents,
            # Resuming drops lines that an earlier step has too.
            files={**self._target.files, LEDGER: self._unpublished_lines + event.ledger.text()},
            lineage=self._target.lineage,
            stage_name=self._target.stage_name,
            run=self._history(event.state.step),
        )

    def _published(self, stays: bool, records: list[FileRecord], report: SaveReport) -> None:
        """A step is published in the run folder: remove those that it replaces. In any thread."""
        if report.kind == "durable":
            if stays:
                self._unpublished_lines = b""
            if self._non_persistent is not None:
                self._non_persistent.overtake(report.step)
        if self._ranks.rank == 0:
            for step in self._retention.published(report.step, stays):
                remove_step(self._target.url, step)
            self._log_save(report, self._target.url)

    def _log_save(self, report: SaveReport, root_url: str) -> None:
        self.reports.append(report)
        self._report(report)
        log.info(
            "saved checkpoint step=%d kind=%s blocked_seconds=%.2f durable_after_seconds=%.2f "
            "bytes=%d gigabytes_per_second=%.2f url=%s",
            *(report.step, report.kind, report.blocked_seconds, report.durable_seconds),
            *(report.bytes, report.gigabytes_per_second),
            join(root_url, step_folder(report.step)),
        )

    def _tensors(self) -> dict[str, LocalTensors]:
        is_async = self._background is not None
        tensors = model_tensors(self._train_module.chunks, buffers_apart=is_async)
        if not self._save_optimizer:
            return tensors
        module = self._train_module
        return tensors | optimizer_tensors(module) | scaling_tensors(module)

    def _history(self, step: int) -> dict[str, Any]:
        """The layouts and courses of all steps, for the manifest of a step."""
        segments = self._course.up_to(self._first_step, step) if self._course else ()
        return {**spans_document(self._spans_to(step)), **segments_document(segments)}

    def _spans_to(self, step: int) -> tuple[DpSpan, ...]:
        dp = self._train_module.groups.dims.dp
        return with_steps(self._spans, DpSpan(self._first_step, step, dp, self._micro_batch_size))


def _divides(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


class Retention:
    """Decides which temporary steps to remove. Called from several threads."""

    def __init__(self, keep_last: int, staying: Iterable[int], passing: Iterable[int]) -> None:
        """keep_last: number of newest steps to keep."""
        self._keep_last = keep_last
        self._passing = list(passing)
        self._newest = sorted([*staying, *self._passing])
        self._lock = threading.Lock()

    def published(self, step: int, stays: bool) -> list[int]:
        """The steps to remove now that this one is published; perhaps itself, if newer steps are
        there."""
        with self._lock:
            before = [s for s in self._passing if s != step]  # a repaired step may be listed
            passing = before if stays else [*before, step]
            newest = sorted([*(s for s in self._newest if s != step), step])
            self._newest = newest[-self._keep_last :]
            self._passing = [s for s in passing if s in self._newest]
            return [s for s in passing if s not in self._newest]
