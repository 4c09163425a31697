"""Callbacks of the training loop, and the event that they receive."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.training.loop.ledger import Ledger, StepRecord
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.throughput import StepTiming


@dataclass(frozen=True, slots=True)
class NextStep:
    """Rates and loss scale of the next step, which Megatron-LM logs for a step. The record has
    those of the step itself."""

    learning_rate: float
    decoupled_learning_rate: float | None = None
    """None without --decoupled-lr."""
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """The end of a step; step 0 is the validation before the first step."""

    record: StepRecord
    timing: StepTiming | None
    """None for step 0, for the second event of a step, and for a skipped step."""
    next_step: NextStep
    state: TrainState
    ledger: Ledger
    is_last: bool
    """The last step of the run."""
    is_stopping: bool
    """The loop ends after this step, perhaps before the run is finished."""
    is_measured: bool = True
    """False if a request to stop cut the validation of this step short. After the next start
    validates, the step has a second event, and only then its line in the ledger."""


class Callback:
    """Runs on every rank to which it was given. Only a callback that all ranks have may
    communicate."""

    def begin(self, state: TrainState) -> None:
        """Called before the first step, after `state.step` steps of earlier attempts."""

    def after_step(self, event: StepEvent) -> None:
        """Called at the end of a step."""

    def end(self) -> None:
        """Called at the end of the loop."""

    def failed(self) -> None:
        """Called after an error on this rank; must not communicate."""
