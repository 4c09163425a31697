"""What a callback may hear."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.training.loop.ledger import Ledger, StepRecord
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.throughput import StepTiming


@dataclass(frozen=True, slots=True)
class NextStep:
    """What a step leaves to the next one, which is what Megatron-LM logs for it. What the step was
    taken with is in its record."""

    learning_rate: float
    decoupled_learning_rate: float | None = None
    """None without --decoupled-lr."""
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step that is over, or, with step 0, the measurement before the first."""

    record: StepRecord
    timing: StepTiming | None
    """None for step 0, where a step is heard of again, and where it was passed over."""
    next_step: NextStep
    state: TrainState
    ledger: Ledger
    is_last: bool
    """The last step of the run."""
    is_stopping: bool
    """The loop ends after this step, though the run may not be finished."""
    is_measured: bool = True
    """False when a measurement that belongs to the step was abandoned because of a request to stop:
    the step is heard of again once that is made good, and the ledger has its line only then."""


class Callback:
    """Heard on every rank; only what it does with a group is done by all."""

    def begin(self, state: TrainState) -> None:
        """The loop is about to begin, after `state.step` steps."""

    def after_step(self, event: StepEvent) -> None:
        """A step is over."""

    def end(self) -> None:
        """The loop has ended without an error."""

    def failed(self) -> None:
        """The loop has ended with an error, on this rank at least: no place to communicate."""
