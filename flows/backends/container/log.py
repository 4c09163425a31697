"""What a container writes, as it comes: into log.txt byte by byte, to the run's logger by lines.

The engine keeps all that a container ever wrote. log.txt has the same bytes from the beginning, so
its size tells how far this program, or the one before it, has read."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from flows.backends.container.client import ContainerClient
from flows.logs.lines import Lines
from trainyard.errors import TrainyardError

log = logging.getLogger(__name__)

TAIL_BYTES = 2**16
"""As much of a line that was begun before is shown again."""


class ContainerLog(threading.Thread):
    """Reads on until the container has ended, or the connection has."""

    def __init__(
        self, client: ContainerClient, name: str, path: Path, say: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"log of {name}", daemon=True)
        self._client = client
        self._container = name
        self._path = path
        self._say = say
        self.trouble = ""
        """Why the reading ended before the container did; empty when it did not."""

    def run(self) -> None:
        """The thread."""
        try:
            self._read()
        except (TrainyardError, OSError) as error:  # a disk may be full
            self.trouble = str(error)

    def _read(self) -> None:
        lines = Lines()
        with self._path.open("a+b", buffering=0) as file:
            is_ours = _lock(file)
            before = file.seek(0, os.SEEK_END)
            file.seek(max(0, before - TAIL_BYTES))
            list(lines.feed(file.read(TAIL_BYTES)))  # leaves the beginning of an unfinished line
            for chunk in self._client.output(self._container):
                new = chunk[before:]
                before = max(0, before - len(chunk))
                if is_ours:
                    self._keep(file, new)
                for line in lines.feed(new):
                    self._say(line)
        for line in lines.finish():
            self._say(line)

    def _keep(self, file: FileIO, chunk: bytes) -> None:
        """Write it down; on a full disk no more, and what is missing the next reader writes."""
        rest = memoryview(chunk)
        try:
            while rest and not self.trouble:
                rest = rest[file.write(rest) :]
        except OSError as error:
            self.trouble = f"{self._path} cannot be written: {error}"


def _lock(file: FileIO) -> bool:
    """False when another flow that follows this container writes its log."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.debug("no lock on the log: %s", error)
    return True
