"""How long each step took, kept while the run lasts and handed on when it is saved."""

from __future__ import annotations

from collections.abc import Callable

from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.throughput import StepTiming


class Timings(Callback):
    """Collects the timing of every step; `keep(step, lines)` gets those since the last time it was
    called."""

    def __init__(self, interval: int, keep: Callable[[int, list[str]], None]) -> None:
        self.timings: list[StepTiming] = []
        self._interval = interval
        self._keep = keep
        self._num_kept = 0

    def after_step(self, event: StepEvent) -> None:
        """Note the step's time."""
        if event.timing is None:
            return
        self.timings.append(event.timing)
        if event.is_last or event.is_stopping or event.record.step % self._interval == 0:
            new = self.timings[self._num_kept :]
            self._keep(event.record.step, [timing.line() for timing in new])
            self._num_kept = len(self.timings)
