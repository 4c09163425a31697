"""The last finished step of a training, for the report of its failure."""

from __future__ import annotations

import os
from pathlib import Path

from stages.runtime.failure import STEP_DIGITS
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState


class ProgressFile(Callback):
    """Knows the last finished step of this rank, and writes it to a file on rank 0. Runs on every
    rank, as any may fail first."""

    def __init__(self, file: Path | None = None) -> None:
        """file: read by the parent process when a rank dies without a message; on rank 0 alone."""
        self._file = file
        self._descriptor: int | None = None
        self._state: TrainState | None = None

    @property
    def step(self) -> int | None:
        """None before the first step. Read by any thread, also when saving the step fails."""
        return (self._state and self._state.step) or None

    def begin(self, state: TrainState) -> None:
        """Record the step that the run resumes from."""
        self._state = state
        if self._file is not None:
            self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        self._write(state.step)

    def after_step(self, event: StepEvent) -> None:
        """Record the step."""
        self._write(event.record.step)

    def _write(self, step: int) -> None:
        # One write of fixed size over the old number: a reader sees either the old or the new one.
        if self._descriptor is not None:
            os.pwrite(self._descriptor, b"%*d" % (STEP_DIGITS, step), 0)
