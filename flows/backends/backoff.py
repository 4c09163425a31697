"""A submission that waits for room: said now and then, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from flows.logs.console import Log
from trainyard.errors import InfrastructureError

T = TypeVar("T")

AGAIN_SECONDS = 3600.0
"""Between two lines in the log."""


class NoRoomError(InfrastructureError):
    """What was to be submitted is refused until something of others has gone; nothing was made."""


class SubmitBackoff:
    """The waiting of one submission."""

    def __init__(self, name: str, room_seconds: float | None, log: Log) -> None:
        """name: of the job; room_seconds: so long it may wait, None: for ever."""
        self._name = name
        self._limit = room_seconds
        self._log = log
        self._since: float | None = None
        self._told: float | None = None

    async def submitted(self, submit: Callable[[], Awaitable[T]], most: float) -> T:
        """What is submitted as soon as there is room, with a try each `most` seconds. Between two
        tries nothing is there: being cancelled has nothing to end."""
        while True:
            try:
                return await submit()
            except NoRoomError as full:
                pause = self.pause(full, time.monotonic(), most)
            await asyncio.sleep(pause)

    def pause(self, full: NoRoomError, now: float, most: float) -> float:
        """There is no room now: seconds until the next try, at most so many. Raises what was said
        of that where it has lasted for too long."""
        if self._since is None:
            self._since = now
        left = most if self._limit is None else self._since + self._limit - now
        if left <= 0:
            raise NoRoomError(f"{full}; no room came in {self._limit:g} s") from full
        if self._told is None or now - self._told >= AGAIN_SECONDS:
            self._told = now
            self._log.warning("%s waits to be submitted: %s", self._name, full)
        return min(left, most)
