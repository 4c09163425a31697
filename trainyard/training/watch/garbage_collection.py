"""Python's garbage, collected on all ranks at the same steps (--manual-gc).

A collection that comes now and then, on each rank when it likes, makes all others wait for it."""

from __future__ import annotations

import gc

from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState


class GarbageCollection(Callback):
    """Switches the collector off while a run lasts, and collects at steps that `interval` divides,
    at measurements and before checkpoints."""

    def __init__(self, interval: int, save_interval: int | None = None) -> None:
        """interval: 0 for none of its own."""
        self._interval = interval
        self._save_interval = save_interval
        self._was_enabled = False

    def begin(self, state: TrainState) -> None:
        """Take over."""
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def after_step(self, event: StepEvent) -> None:
        """Collect if it is time to."""
        step = event.record.step
        intervals = [i for i in (self._interval, self._save_interval) if i]
        is_due = any(step % interval == 0 for interval in intervals)
        if is_due or event.record.validation_loss is not None:
            gc.collect()

    def end(self) -> None:
        """Leave it as it was."""
        if self._was_enabled:
            gc.enable()

    def failed(self) -> None:
        """Leave it as it was."""
        self.end()
