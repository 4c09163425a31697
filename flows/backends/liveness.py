"""Whether a running job is alive: it writes to its log, or touches its heartbeat file."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from flows.backends.run_folder import run_folder_io


class Liveness:
    """How long a running job has been silent.

    Only changes of file times count, since clocks of nodes and file servers differ from ours."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._times = [_mtime(path) for path in self._files]
        self._last = time.monotonic()

    def renew(self) -> None:
        """Start the count again from now, such as while the job does not run yet."""
        self._last = time.monotonic()

    def silent_seconds(self, last_line: float | None = None) -> float:
        """Seconds since a file changed; InfrastructureError if that cannot be read.

        last_line: time.monotonic() of the last output, if it does not come from a file."""
        now, times = time.monotonic(), [_mtime(path) for path in self._files]
        if times != self._times:
            self._times, self._last = times, now
        self._last = max(self._last, last_line or 0.0)
        return now - self._last


def _mtime(path: Path) -> float:
    with run_folder_io(path.parent):
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
