"""When a step is saved, and which saved steps stay.

Steps at --save-interval and the last one stay, of the former only every --save-retain-interval'th
where that is given. Another, or one saved because the run was asked to stop, is only there to
continue from: once newer ones are published it goes, so that a run that was stopped ends with the
same files as one that was not. Its lines of the ledger are in the next that stays as well.

With --async-save training waits for a copy to host memory only; a step that ends the run is always
waited for. The next save, and the end of the run, wait for the one before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import BackgroundSave, SaveReport
from trainyard.checkpoint.layout import Held
from trainyard.checkpoint.save import Ranks, StepContents, prepare_step, write_step
from trainyard.checkpoint.steps import step_folder
from trainyard.training.callbacks.base import Callback, StepEvent
from trainyard.training.ledger import FILE as LEDGER
from trainyard.training.spans import Span, spans_document, with_steps
from trainyard.training.state import TrainState
from trainyard.training.step import Trainee
from trainyard.training.tensors import model_tensors, optimizer_tensors

log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 120.0
"""How long a failed run waits for the step that is still being written."""

STAYS = "stays"
"""Key of state.json: false for a step that only serves to continue from."""


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
        trainee: Trainee,
        interval: int | None,
        *,
        retain_interval: int | None = None,
        keep_last: int = 1,
        micro_batch_size: int,
        save_optimizer: bool = True,
        facts: Mapping[str, Any],
        staying: tuple[int, ...] = (),
        passing: tuple[int, ...] = (),
        spans: tuple[Span, ...] = (),
        before_first: Callable[[], None] = lambda: None,
        background: BackgroundSave | None = None,
    ) -> None:
        """retain_interval: of the steps at `interval` those stay that it divides; None: all.
        keep_last: the newest steps that do not go yet. facts: what else `state.json` says.
        staying, passing: steps that are there, and do not go or do. spans: on how many ranks the
        steps before were taken.

        before_first: called on rank 0 before the first save. background: writes steps that the run
        need not wait for; None: it waits for all."""
        self._folder = folder
        self._trainee = trainee
        self._interval = interval
        self._retain_interval = retain_interval or interval
        self._keep_last = keep_last
        self._micro_batch_size = micro_batch_size
        self._save_optimizer = save_optimizer
        self._facts = facts
        self._passing = list(passing)
        self._newest = sorted(staying + passing)
        self._spans = spans
        self._first_step = 1
        self._saved_step: int | None = None
        self._before_first: Callable[[], None] | None = before_first
        self._background = background
        groups = trainee.groups
        self._ranks = Ranks(groups.world, groups.rank, groups.dims.world_size)
        self.reports: list[SaveReport] = []
        """Of the steps that were saved, on rank 0."""

    def begin(self, state: TrainState) -> None:
        """Steps from here on are taken on the ranks of this process."""
        self._first_step = state.step + 1
        self._saved_step = None

    def after_step(self, event: StepEvent) -> None:
        """Save if it is time to."""
        if self._background is not None:
            self._background.check()
        step = event.record.step
        if step == self._saved_step:
            self._finish()  # heard of again: it is there, and the ledger's lines are in it
            return
        is_due = event.is_measured and (event.is_last or _divides(self._interval, step))
        stays = is_due and (event.is_last or _divides(self._retain_interval, step))
        if step > 0 and (is_due or event.is_stopping):
            self._save(event, stays)

    def end(self) -> None:
        """All that was begun is saved."""
        self._finish()

    def failed(self) -> None:
        """Let a step that is being written become whole, if it can."""
        if self._background is not None:
            self._background.give_up(GIVE_UP_SECONDS)

    def _finish(self) -> None:
        if self._background is not None and (seconds := self._background.finish()) > 1.0:
            log.info("waited %.1f s for the step that was being saved", seconds)

    def _save(self, event: StepEvent, stays: bool) -> None:
        began = time.monotonic()
        self._finish()
        self._saved_step = event.state.step
        self._trainee.optimizer.finish_parameters()
        if self._ranks.rank == 0 and self._before_first is not None:
            self._before_first()
        self._before_first = None
        contents = self._contents(event, stays)
        prepared = prepare_step(
            self._folder.url, event.state.step, self._tensors(), contents.lineage, self._ranks
        )
        if stays:
            event.ledger.forget()
        done = partial(self._done, self._passed_by(event.state.step, stays))
        if self._background is not None and not (event.is_stopping or event.is_last):
            self._background.start(prepared, contents, began, done)
            return
        records = write_step(prepared, contents, self._ranks)
        seconds = time.monotonic() - began
        size = sum(record.size_bytes for record in records)
        done(records, SaveReport(event.state.step, size, seconds, seconds))

    def _passed_by(self, step: int, stays: bool) -> list[int]:
        """The steps that go once this one is published."""
        before = [s for s in self._passing if s != step]  # it may be there and be made good
        self._passing = before if stays else [*before, step]
        self._newest = [*(s for s in self._newest if s != step), step][-self._keep_last :]
        passed = [s for s in self._passing if s not in self._newest]
        self._passing = [s for s in self._passing if s in self._newest]
        return passed

    def _contents(self, event: StepEvent, stays: bool) -> StepContents:
        return StepContents(
            state={**self._facts, **event.state.state_dict(), STAYS: stays},
            documents=self._folder.documents,
            files={**self._folder.files, LEDGER: event.ledger.text()},
            lineage=self._folder.lineage,
            stage_name=self._folder.stage_name,
            run=spans_document(self._spans_to(event.state.step)),
        )

    def _done(self, passed: list[int], records: list[FileRecord], report: SaveReport) -> None:
        """A step is published, in whatever thread wrote it: those that it replaces go."""
        if self._ranks.rank != 0:
            return
        for step in passed:
            remove_step(self._folder.url, step)
        self.reports.append(report)
        log.info(
            "saved checkpoint step=%d blocked_seconds=%.2f durable_after_seconds=%.2f bytes=%d "
            "gigabytes_per_second=%.2f files=%d url=%s",
            *(report.step, report.blocked_seconds, report.durable_seconds, report.bytes),
            *(report.gigabytes_per_second, len(records)),
            join(self._folder.url, step_folder(report.step)),
        )

    def _tensors(self) -> dict[str, Held]:
        tensors = model_tensors(self._trainee.chunks)
        return tensors | (optimizer_tensors(self._trainee) if self._save_optimizer else {})

    def _spans_to(self, step: int) -> tuple[Span, ...]:
        dp = self._trainee.groups.dims.dp
        return with_steps(self._spans, Span(self._first_step, step, dp, self._micro_batch_size))


def _divides(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


def remove_step(root_url: str, step: int) -> None:
    """Remove a step; its manifest first, so that it is never there in part."""
    url = join(root_url, step_folder(step))
    store.delete(join(url, MANIFEST))
    store.delete_tree(url)
