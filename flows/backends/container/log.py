"""Copies the output of a container to log.txt byte by byte, and to the run's logger line by line.

The engine keeps all output of a container. log.txt has the same bytes from the beginning, so its
size is how far this program, or the one before it, has read."""

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
"""Most of an unfinished line that is logged again."""


class ContainerLog(threading.Thread):
    """Reads until the container ends, or the connection does."""

    def __init__(
        self, client: ContainerClient, name: str, path: Path, relay: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"log of {name}", daemon=True)
        self._client = client
        self._container = name
        self._path = path
        self._relay = relay
        self.trouble = ""
        """Why reading stopped before the container ended; else empty."""

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
            list(lines.feed(file.read(TAIL_BYTES)))  # keeps the beginning of an unfinished line
            for chunk in self._client.output(self._container):
                new = chunk[before:]
                before = max(0, before - len(chunk))
                if is_ours:
                    self._write(file, new)
                for line in lines.feed(new):
                    self._relay(line)
        for line in lines.finish():
            self._relay(line)

    def _write(self, file: FileIO, chunk: bytes) -> None:
        """Append a chunk; after an error, nothing more: the next reader writes what is missing."""
        rest = memoryview(chunk)
        try:
            while rest and not self.trouble:
                rest = rest[file.write(rest) :]
        except OSError as error:
            self.trouble = f"{self._path} cannot be written: {error}"


def _lock(file: FileIO) -> bool:
    """Whether we may write: False if another flow that follows this container writes its log."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.debug("no lock on the log: %s", error)
    return True
