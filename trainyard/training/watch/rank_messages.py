"""Short notes that ranks leave for each other without waiting: what a watchdog tells and reads
while training itself may hang."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any, Protocol

PREFIX = "trainyard/watch"
TIMEOUT = timedelta(seconds=10)


class RankMailbox(Protocol):
    """Notes by name."""

    def put(self, name: str, text: str) -> None:
        """Leave a note."""

    def read(self, name: str) -> str | None:
        """The note of that name; None where there is none."""


class LocalBoard:
    """Of one process, and its threads."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, name: str, text: str) -> None:
        """Leave a note."""
        with self._lock:
            self._notes[name] = text

    def read(self, name: str) -> str | None:
        """The note of that name."""
        with self._lock:
            return self._notes.get(name)


class StoreBoard:
    """In the store in which ranks met, through a connection of its own: the one that training uses
    is locked while it waits for something."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """Leave a note."""
        self._store.set(name, text)

    def read(self, name: str) -> str | None:
        """The note of that name."""
        return self._store.get(name).decode() if self._store.check([name]) else None


def open_board(world_size: int) -> RankMailbox:
    """The board of the ranks that this process is one of; ranks that a program joined by other
    means than MASTER_ADDR are watched each by itself."""
    if world_size == 1 or "MASTER_ADDR" not in os.environ:
        return LocalBoard()
    import torch.distributed

    dist: Any = torch.distributed  # its stubs hide the stores
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=TIMEOUT,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return StoreBoard(dist.PrefixStore(f"{PREFIX}/{attempt}", store))
