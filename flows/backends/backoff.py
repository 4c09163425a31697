"""Pauses between retries of requests, and of submissions that a full queue refuses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from flows.backends.errors import NoRoomError
from flows.logs.console import Log

T = TypeVar("T")

REPEAT_SECONDS = 3600.0
"""Between two warnings that a submission waits."""


def pauses(patience_seconds: float, most_seconds: float = 15.0) -> Iterator[float]:
    """Seconds before each try: 0, then doubling with jitter, until the patience is over.

    The time that the tries themselves take counts."""
    began, paused, pause = time.monotonic(), 0.0, 0.5
    yield 0.0
    while max(paused, time.monotonic() - began) < patience_seconds:
        wait = pause * random.uniform(0.8, 1.2)
        yield wait
        paused += wait
        pause = min(2 * pause, most_seconds)


class SubmitBackoff:
    """The retries of one submission."""

    def __init__(self, name: str, room_seconds: float | None, log: Log) -> None:
        """name: of the job; room_seconds: the longest wait, None: no limit."""
        self._name = name
        self._limit = room_seconds
        self._log = log
        self._since: float | None = None
        self._warned_at: float | None = None

    async def submit(self, submit: Callable[[], Awaitable[T]], pause_seconds: float) -> T:
        """Submit as soon as there is room. Cancelling this between two tries creates no job."""
        while True:
            try:
                return await submit()
            except NoRoomError as full:
                pause = self.pause(full, time.monotonic(), pause_seconds)
            await asyncio.sleep(pause)

    def pause(self, full: NoRoomError, now: float, most: float) -> float:
        """Seconds until the next try, at most `most`. Raises NoRoomError after the limit."""
        if self._since is None:
            self._since = now
        left = most if self._limit is None else self._since + self._limit - now
        if left <= 0:
            raise NoRoomError(f"{full}; there was no room for {self._limit:g} s") from full
        if self._warned_at is None or now - self._warned_at >= REPEAT_SECONDS:
            self._warned_at = now
            self._log.warning("%s waits to be submitted: %s", self._name, full)
        return min(left, most)
