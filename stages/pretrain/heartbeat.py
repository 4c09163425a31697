"""A file that says that a training lives, for whoever started it and waits: with a long
--log-interval its log says nothing for as long."""

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
"""In the run folder; the job blocks look when it changed (flows/backends/liveness.py)."""

BETWEEN_SECONDS = 5.0
"""Steps may take a millisecond, and the folder lie on a file server."""


class Heartbeat(Callback):
    """Renews the time of the file when steps are done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = 0.0

    def begin(self, state: TrainState) -> None:
        """The model is built, and the checkpoint loaded."""
        self._beat()

    def after_step(self, event: StepEvent) -> None:
        """A step is over."""
        if time.monotonic() - self._last >= BETWEEN_SECONDS:
            self._beat()

    def _beat(self) -> None:
        self._last = time.monotonic()
        try:
            self._path.touch()
        except OSError as error:  # a full disk is no reason to end a training
            log.warning("%s was not renewed: %s", self._path, error)


def heartbeats(rank: int) -> tuple[Heartbeat, ...]:
    """That of rank 0, for whom steps end when they do for all; none where nobody waits for it."""
    folder = os.environ.get(RUN_DIR)
    return (Heartbeat(Path(folder, FILE)),) if folder and rank == 0 else ()
