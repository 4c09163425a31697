"""When a step is saved, and which saved steps stay.

Steps at --save-interval and the last one stay. One saved because the run was asked to stop is only
there to continue from: when the next that stays is published it goes, so that a run that was
stopped ends with the same files as one that was not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join
from trainyard.checkpoint.layout import Held
from trainyard.checkpoint.save import save_step
from trainyard.checkpoint.steps import step_folder
from trainyard.training.callbacks.base import Callback, StepEvent
from trainyard.training.ledger import FILE as LEDGER
from trainyard.training.spans import Span, spans_document, with_steps
from trainyard.training.state import TrainState
from trainyard.training.step import Trainee
from trainyard.training.tensors import model_tensors, optimizer_tensors

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
        micro_batch_size: int,
        save_optimizer: bool = True,
        facts: Mapping[str, Any],
        passing: tuple[int, ...] = (),
        spans: tuple[Span, ...] = (),
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        """facts: what else `state.json` says. passing: steps that are there and do not stay.
        spans: on how many ranks the steps before were taken.

        before_first: called on rank 0 before the first save."""
        self._folder = folder
        self._trainee = trainee
        self._interval = interval
        self._micro_batch_size = micro_batch_size
        self._save_optimizer = save_optimizer
        self._facts = facts
        self._passing = list(passing)
        self._spans = spans
        self._first_step = 1
        self._saved_step: int | None = None
        self._before_first: Callable[[], None] | None = before_first

    def begin(self, state: TrainState) -> None:
        """Steps from here on are taken on the ranks of this process."""
        self._first_step = state.step + 1
        self._saved_step = None

    def after_step(self, event: StepEvent) -> None:
        """Save if it is time to."""
        at_interval = self._interval is not None and event.record.step % self._interval == 0
        if event.record.step == self._saved_step:
            return  # heard of again: it is there, and the ledger's lines are in it
        is_due = event.record.step > 0 and (event.is_last or at_interval)
        stays = is_due and event.is_measured
        if stays or event.is_stopping:
            self._save(event, stays)

    def _save(self, event: StepEvent, stays: bool) -> None:
        groups = self._trainee.groups
        self._saved_step = event.state.step
        self._trainee.optimizer.finish_parameters()
        if groups.rank == 0 and self._before_first is not None:
            self._before_first()
        self._before_first = None
        save_step(
            self._folder.url,
            event.state.step,
            self._tensors(),
            state={**self._facts, **event.state.state_dict(), STAYS: stays},
            documents=self._folder.documents,
            files={**self._folder.files, LEDGER: event.ledger.text()},
            lineage=self._folder.lineage,
            stage_name=self._folder.stage_name,
            group=groups.world,
            rank=groups.rank,
            world_size=groups.dims.world_size,
            run=spans_document(self._spans_to(event.state.step)),
        )
        if not stays:
            self._passing.append(event.state.step)
            return
        event.ledger.forget()
        if groups.rank == 0:
            for step in self._passing:
                if step != event.state.step:
                    remove_step(self._folder.url, step)
        self._passing = []

    def _tensors(self) -> dict[str, Held]:
        tensors = model_tensors(self._trainee.chunks)
        return tensors | (optimizer_tensors(self._trainee) if self._save_optimizer else {})

    def _spans_to(self, step: int) -> tuple[Span, ...]:
        dp = self._trainee.groups.dims.dp
        return with_steps(self._spans, Span(self._first_step, step, dp, self._micro_batch_size))


def remove_step(root_url: str, step: int) -> None:
    """Remove a step; its manifest first, so that it is never there in part."""
    url = join(root_url, step_folder(step))
    store.delete(join(url, MANIFEST))
    store.delete_tree(url)
