"""Signs that a job is alive: it writes to its log, or renews its heartbeat."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from flows.backends.notes import run_folder_io


class Liveness:
    """When a running job was last heard. Only whether the times of files change counts, since the
    clocks of nodes and of file servers differ from ours."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._times = self._look()
        self._last = time.monotonic()

    def renew(self) -> None:
        """It does not run yet, or was heard otherwise."""
        self._last = time.monotonic()

    def silent_seconds(self, last_line: float | None = None) -> float:
        """Since a file changed; InfrastructureError when that cannot be seen: it is no silence.

        last_line: when it was heard otherwise, by the clock of time.monotonic()."""
        now, times = time.monotonic(), self._look()
        if times != self._times:
            self._times, self._last = times, now
        self._last = max(self._last, last_line or 0.0)
        return now - self._last

    def _look(self) -> list[float]:
        return [_time(path) for path in self._files]


def _time(path: Path) -> float:
    with run_folder_io(path.parent):
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
