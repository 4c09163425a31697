"""A file whose modification time shows that a training is alive. With a long --log-interval, the
log shows nothing for as long."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from stages.runtime.failure import RUN_DIR
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState

log = logging.getLogger(__name__)

FILE = "heartbeat"
"""In the run folder; the job blocks read its modification time (flows/backends/liveness.py)."""

BETWEEN_SECONDS = 5.0
"""Least time between two touches: steps may take milliseconds, and the folder may be on a file
server."""


class Heartbeat(Callback):
    """Touches the file after steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = 0.0

    def begin(self, state: TrainState) -> None:
        """Touch the file, now that the model is built and the checkpoint loaded."""
        self._beat()

    def after_step(self, event: StepEvent) -> None:
        """Touch the file, unless the last touch was a moment ago."""
        if time.monotonic() - self._last >= BETWEEN_SECONDS:
            self._beat()

    def _beat(self) -> None:
        self._last = time.monotonic()
        try:
            self._path.touch()
        except OSError as error:  # a full disk must not end a training
            log.warning("cannot touch heartbeat path=%s: %s", self._path, error)


def heartbeats(rank: int) -> tuple[Heartbeat, ...]:
    """The heartbeat of rank 0, whose steps end with those of all ranks; none outside a job."""
    folder = os.environ.get(RUN_DIR)
    return (Heartbeat(Path(folder, FILE)),) if folder and rank == 0 else ()
