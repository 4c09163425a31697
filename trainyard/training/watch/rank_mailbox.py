"""Messages between ranks, by name, without waiting for one another.

Training may hang meanwhile: between processes the messages go through the rendezvous store, over a
connection of their own."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any, Protocol

PREFIX = "watch"
TIMEOUT = timedelta(seconds=10)


class RankMailbox(Protocol):
    """Messages by name, which ranks exchange without waiting."""

    def put(self, name: str, text: str) -> None:
        """Leave a message."""

    def read(self, name: str) -> str | None:
        """The message of that name, or None."""

    def append(self, name: str, text: str) -> None:
        """Add to the end of a message, which may not exist yet."""

    def claim(self, name: str, text: str) -> str:
        """Leave a message unless there is one; returns the one that is there."""


class LocalMailbox:
    """For the threads of one process."""

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, name: str, text: str) -> None:
        """Leave a message."""
        with self._lock:
            self._messages[name] = text

    def read(self, name: str) -> str | None:
        """The message of that name, or None."""
        with self._lock:
            return self._messages.get(name)

    def append(self, name: str, text: str) -> None:
        """Add to the end of a message, which may not exist yet."""
        with self._lock:
            self._messages[name] = self._messages.get(name, "") + text

    def claim(self, name: str, text: str) -> str:
        """Leave a message unless there is one; returns the one that is there."""
        with self._lock:
            return self._messages.setdefault(name, text)


class StoreMailbox:
    """Mail in the rendezvous store, over a separate connection: training's own is locked while it
    waits."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """Leave a message."""
        self._store.set(name, text)

    def read(self, name: str) -> str | None:
        """The message of that name, or None."""
        return self._store.get(name).decode() if self._store.check([name]) else None

    def append(self, name: str, text: str) -> None:
        """Add to the end of a message, which may not exist yet."""
        self._store.append(name, text)

    def claim(self, name: str, text: str) -> str:
        """Leave a message unless there is one; returns the one that is there."""
        found: str = self._store.compare_set(name, "", text).decode()
        return found


def open_mailbox(world_size: int) -> RankMailbox:
    """The mailbox of all ranks. Ranks that a program joined without MASTER_ADDR have one each."""
    if world_size == 1 or "MASTER_ADDR" not in os.environ:
        return LocalMailbox()
    import torch.distributed

    from trainyard.parallel.rendezvous import store_prefix

    dist: Any = torch.distributed  # its stubs hide the stores
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=TIMEOUT,
    )
    return StoreMailbox(dist.PrefixStore(f"{store_prefix()}/{PREFIX}", store))
