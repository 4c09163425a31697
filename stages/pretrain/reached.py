"""How far a training has come, for what is said of its failure."""

from __future__ import annotations

import os
from pathlib import Path

from stages.runtime.failure import STEP_DIGITS
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState


class Reached(Callback):
    """The last finished step of this rank; on every rank, of which any may fail first."""

    def __init__(self, file: Path | None = None) -> None:
        """file: where a parent looks when a rank died without a word; of rank 0 alone."""
        self._file = file
        self._descriptor: int | None = None
        self._state: TrainState | None = None

    @property
    def step(self) -> int | None:
        """None before the first; asked by any thread, and also where a save of the step failed."""
        return (self._state and self._state.step) or None

    def begin(self, state: TrainState) -> None:
        """The steps before were done by an earlier attempt."""
        self._state = state
        if self._file is not None:
            self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        self._note(state.step)

    def after_step(self, event: StepEvent) -> None:
        """A step is over."""
        self._note(event.record.step)

    def _note(self, step: int) -> None:
        # In one piece, over what was there: a reader sees the one number or the other.
        if self._descriptor is not None:
            os.pwrite(self._descriptor, b"%*d" % (STEP_DIGITS, step), 0)
