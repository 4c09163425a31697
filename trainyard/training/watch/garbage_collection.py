"""Runs Python's garbage collector on all ranks at the same steps (--manual-gc).

Automatic collection runs on each rank at another time, and each time all other ranks wait."""

from __future__ import annotations

import gc

from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState


class GarbageCollection(Callback):
    """Disables automatic collection during a run; collects at multiples of `interval`, at
    validations and before checkpoints."""

    def __init__(self, interval: int, save_interval: int | None = None) -> None:
        """interval: 0: only at validations and checkpoints."""
        self._interval = interval
        self._save_interval = save_interval
        self._was_enabled = False

    def begin(self, state: TrainState) -> None:
        """Disable automatic collection."""
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def after_step(self, event: StepEvent) -> None:
        """Collect if it is due."""
        step = event.record.step
        intervals = [i for i in (self._interval, self._save_interval) if i]
        is_due = any(step % interval == 0 for interval in intervals)
        if is_due or event.record.validation_loss is not None:
            gc.collect()

    def end(self) -> None:
        """Restore the previous setting."""
        if self._was_enabled:
            gc.enable()

    def failed(self) -> None:
        """Restore the previous setting."""
        self.end()
