"""When a step is saved, and which saved steps stay.

Steps at --save-interval and the last one stay, of the former only every --save-retain-interval'th
where that is given. Another, or one saved because the run was asked to stop, is only there to
continue from: once newer ones are published it goes, so that a run that was stopped ends with the
same files as one that was not. Its lines of the ledger are in the next that stays as well.

With --async-save an update waits for a copy to host memory only, which runs beside the forward and
backward passes before it; a step that ends the run is always waited for. The next save, and the end
of the run, wait for the one before. Steps between those, in other places (`non_persistent`), are as
one that only serves to continue from."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import BackgroundSave, SaveReport
from trainyard.checkpoint.layout import Held
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import StepContents, prepare_step, share_of_rank, write_step
from trainyard.checkpoint.steps import remove_step, step_folder
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import TrainModule
from trainyard.training.run.dp_history import DpSpan, spans_document, with_steps
from trainyard.training.run.node_local_saving import Done, NonPersistentPlan, NonPersistentSaves
from trainyard.training.run.run_steps import STAYS
from trainyard.training.run.tensors import model_tensors, optimizer_tensors

log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 120.0
"""How long a failed run waits for the step that is still being written."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the steps of a run go, and what each carries beside tensors and state."""

    url: str
    lineage: str
    stage_name: str
    documents: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, bytes]


class Checkpointing(Callback):
    """Saves on all ranks together."""

    def __init__(
        self,
        folder: RunFolder,
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
        before_first: Callable[[], None] = lambda: None,
        background: BackgroundSave | None = None,
        between: Callable[[Done], NonPersistentPlan] | None = None,
        report: Callable[[SaveReport], object] = lambda report: None,
    ) -> None:
        """retain_interval: of the steps at `interval` those stay that it divides; None: all.
        keep_last: the newest steps that do not go yet. facts: what else `state.json` says.
        staying, passing: steps that are there, and do not go or do. spans: on how many ranks the
        steps before were taken.

        before_first: called on rank 0 before the first save. background: writes steps that the run
        need not wait for; None: it waits for all. between: how steps are saved elsewhere, given
        what is to be told of one that comes here from there. report: told on rank 0 of what a save
        cost, in any thread."""
        self._folder = folder
        self._train_module = train_module
        self._interval = interval
        self._retain_interval = retain_interval or interval
        self._micro_batch_size = micro_batch_size
        self._save_optimizer = save_optimizer
        self._facts = facts
        self._retention = Retention(keep_last, staying, passing)
        self._spans = spans
        self._first_step = 1
        self._saved_step: int | None = None
        self._before_first: Callable[[], None] | None = before_first
        self._background = background
        groups = train_module.groups
        self._ranks = Ranks(groups.world, groups.rank, groups.dims.world_size)
        self._report = report
        self._lines_under_way = b""
        """Of the ledger, in a step that stays and is not published yet."""
        self._between: NonPersistentSaves | None = None
        if between is not None:
            made = between(partial(self._done, False))
            self._between = NonPersistentSaves(made, self._ranks, self._told)
        self.reports: list[SaveReport] = []
        """Of the steps that were saved, on rank 0."""

    def begin(self, state: TrainState) -> None:
        """Steps from here on are taken on the ranks of this process."""
        self._first_step = state.step + 1
        self._saved_step = None
        self._train_module.optimizer.before_update = self._hold_update
        if self._background is not None:
            share = share_of_rank(self._tensors(), self._ranks)
            self._background.reserve(share)
            if self._between is not None:
                self._between.reserve(share)

    def after_step(self, event: StepEvent) -> None:
        """Save if it is time to."""
        if self._background is not None:
            self._background.check()
        if self._between is not None:
            self._between.check()
        step = event.record.step
        if step == self._saved_step:
            self._finish()  # heard of again: it is there, and the ledger's lines are in it
            return
        is_due = event.is_measured and (event.is_last or _divides(self._interval, step))
        stays = is_due and (event.is_last or _divides(self._retain_interval, step))
        if step > 0 and (is_due or event.is_stopping):
            self._save(event, stays)
        elif step > 0 and event.is_measured:
            self._save_between(event)

    def end(self) -> None:
        """All that was begun is saved."""
        self._finish()
        if self._between is not None:
            self._between.finish()

    def failed(self) -> None:
        """Let a step that is being written become whole, if it can."""
        if self._background is not None:
            self._background.give_up(GIVE_UP_SECONDS)
        if self._between is not None:
            self._between.give_up(GIVE_UP_SECONDS)

    def _finish(self) -> None:
        if self._background is not None and (seconds := self._background.finish()) > 1.0:
            log.info("waited %.1f s for the step that was being saved", seconds)

    def _save(self, event: StepEvent, stays: bool) -> None:
        began = time.monotonic()
        self._finish()
        is_final = event.is_stopping or event.is_last
        if is_final and self._between is not None:
            self._between.finish()
        self._saved_step = event.state.step
        self._train_module.optimizer.finish_parameters()
        self._make_room()
        contents = self._contents(event, stays)
        prepared = prepare_step(
            self._folder.url, event.state.step, self._tensors(), contents.lineage, self._ranks
        )
        if stays:
            self._lines_under_way = event.ledger.text()
            event.ledger.forget()
        done = partial(self._done, stays)
        if self._background is not None and not is_final:
            self._background.start(prepared, contents, began, done)
            return
        records = write_step(prepared, contents, self._ranks)
        seconds = time.monotonic() - began
        size = sum(record.size_bytes for record in records)
        done(records, SaveReport(event.state.step, size, seconds, seconds))

    def _hold_update(self) -> None:
        """Whatever is being copied is copied as it is."""
        if self._background is not None:
            self._background.hold_update()
        if self._between is not None:
            self._between.hold_update()

    def _save_between(self, event: StepEvent) -> None:
        if self._between is None or not self._between.is_due(event.record.step):
            return
        self._train_module.optimizer.finish_parameters()
        if self._between.needs_room:
            self._make_room()
        contents = self._contents(event, stays=False)
        self._between.save(event.state.step, self._tensors(), contents)

    def _make_room(self) -> None:
        if self._ranks.rank == 0 and self._before_first is not None:
            self._before_first()
        self._before_first = None

    def _contents(self, event: StepEvent, stays: bool) -> StepContents:
        return StepContents(
            state={**self._facts, **event.state.state_dict(), STAYS: stays},
            documents=self._folder.documents,
            # Lines that are twice there, where that step is published by now, are seen to when this
            # one is gone on from.
            files={**self._folder.files, LEDGER: self._lines_under_way + event.ledger.text()},
            lineage=self._folder.lineage,
            stage_name=self._folder.stage_name,
            run=spans_document(self._spans_to(event.state.step)),
        )

    def _done(self, stays: bool, records: list[FileRecord], report: SaveReport) -> None:
        """A step is published in the run folder, in whatever thread: those that it replaces go."""
        if report.kind == "durable":
            if stays:
                self._lines_under_way = b""
            if self._between is not None:
                self._between.overtake(report.step)
        if self._ranks.rank == 0:
            for step in self._retention.published(report.step, stays):
                remove_step(self._folder.url, step)
            self._told(report, self._folder.url)

    def _told(self, report: SaveReport, root_url: str) -> None:
        self.reports.append(report)
        self._report(report)
        log.info(
            "saved checkpoint step=%d kind=%s blocked_seconds=%.2f durable_after_seconds=%.2f "
            "bytes=%d gigabytes_per_second=%.2f url=%s",
            *(report.step, report.kind, report.blocked_seconds, report.durable_seconds),
            *(report.bytes, report.gigabytes_per_second),
            join(root_url, step_folder(report.step)),
        )

    def _tensors(self) -> dict[str, Held]:
        goes_on = self._background is not None
        tensors = model_tensors(self._train_module.chunks, buffers_apart=goes_on)
        return tensors | (optimizer_tensors(self._train_module) if self._save_optimizer else {})

    def _spans_to(self, step: int) -> tuple[DpSpan, ...]:
        dp = self._train_module.groups.dims.dp
        return with_steps(self._spans, DpSpan(self._first_step, step, dp, self._micro_batch_size))


def _divides(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


class Retention:
    """Steps that stay, and those that only serve to continue from and pass. Told by threads."""

    def __init__(self, keep_last: int, staying: Iterable[int], passing: Iterable[int]) -> None:
        """keep_last: the newest steps that do not go yet."""
        self._keep_last = keep_last
        self._passing = list(passing)
        self._newest = sorted([*staying, *self._passing])
        self._lock = threading.Lock()

    def published(self, step: int, stays: bool) -> list[int]:
        """A step is there: those that go now, which may be the step itself where newer ones are
        there already."""
        with self._lock:
            before = [s for s in self._passing if s != step]  # it may be there and be made good
            passing = before if stays else [*before, step]
            newest = sorted([*(s for s in self._newest if s != step), step])
            self._newest = newest[-self._keep_last :]
            self._passing = [s for s in passing if s in self._newest]
            return [s for s in passing if s not in self._newest]
