"""Relays the log of a process to the run's logger.

The process writes its log itself, so no line is lost if this program dies. A file beside the log is
how far that was relayed: relayed.json beside log.txt, relayed-00003.json beside log-00003.txt. It
is removed with the last line. The next attempt at the job relays what a killed flow did not."""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flows.logs.lines import Followed

LOG_STEM, MEMORY_STEM = "log", "relayed"
POLL_SECONDS = 0.1
REMEMBER_SECONDS = 1.0
"""Between two records of how far the log was relayed; a killed flow repeats at most this much."""


class ProcessLog(threading.Thread):
    """Relays lines as they are written, until `end`.

    A thread, since it must continue while all tasks of the loop are cancelled."""

    def __init__(self, log: Path, name: str, relay: Callable[[str], None]) -> None:
        super().__init__(name=f"log of {name}", daemon=True)
        self._log, self._relay = log, relay
        self._followed = Followed(log.parent, memory_of(log).name)
        self._ended = threading.Event()
        self._remembered = 0.0

    def end(self) -> None:
        """Relay the last lines, and stop."""
        self._ended.set()

    def run(self) -> None:
        """The thread."""
        with self._log.open("rb") as log:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(log, fcntl.LOCK_EX)  # shows other flows that this one is alive
            self._remember()
            while not self._ended.wait(POLL_SECONDS):
                self._relay_new()
            self._relay_new()
            for line in self._followed.finish(self._log.name):
                self._relay(line)
        with contextlib.suppress(OSError):
            memory_of(self._log).unlink()

    def _relay_new(self) -> None:
        with contextlib.suppress(OSError):  # such as a stale NFS handle: the next poll reads it
            for line in self._followed.read(self._log.name):
                self._relay(line)
        if time.monotonic() - self._remembered > REMEMBER_SECONDS:
            self._remember()

    def _remember(self) -> None:
        with contextlib.suppress(OSError):  # such as a full disk
            self._followed.remember()
        self._remembered = time.monotonic()


def memory_of(log: Path) -> Path:
    """The file that says how far a log was relayed."""
    return log.with_name(log.name.replace(LOG_STEM, MEMORY_STEM, 1)).with_suffix(".json")


def relay_unfinished(folder: Path, relay: Callable[[str], None]) -> None:
    """Relay what killed flows did not relay of earlier attempts at the job of a run folder.

    Such an attempt may still be saving; then the next call relays the end of its log."""
    for memory in sorted(folder.parent.glob(f"*/{MEMORY_STEM}*.json")):
        path = memory.with_name(memory.name.replace(MEMORY_STEM, LOG_STEM, 1)).with_suffix(".txt")
        with contextlib.suppress(OSError), path.open("rb") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its flow is alive
                continue
            followed = Followed(memory.parent, memory.name)
            if lines := [*followed.read(path.name)]:
                relay(f"an earlier attempt, whose flow was killed, logged the rest ({log.name}):")
                for line in lines:
                    relay(line)
                followed.remember()
