"""A submission that waits for room: said now and then, and not for ever."""

from __future__ import annotations

from flows.console import Log
from trainyard.errors import InfrastructureError

AGAIN_SECONDS = 3600.0
"""Between two lines in the log."""


class NoRoomError(InfrastructureError):
    """What was to be submitted is refused until something of others has gone; nothing was made."""


class Room:
    """The waiting of one submission."""

    def __init__(self, name: str, room_seconds: float | None, log: Log) -> None:
        """name: of the job; room_seconds: so long it may wait, None: for ever."""
        self._name = name
        self._limit = room_seconds
        self._log = log
        self._since: float | None = None
        self._told: float | None = None

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
