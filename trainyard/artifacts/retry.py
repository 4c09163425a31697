"""How long a store is waited for that answered before and does not now.

A store that is started again or a switch that is replaced is away for half a minute. A stage that
ends then loses what it had not saved; one that waits loses half a minute. A store that never
answered is another matter: its name or port is wrong, and that is said in seconds.

Only what runs inside `waiting()` waits, which are the stages: whoever looks at a store for a person
gives the answer that it has."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""From the first failure of a call to the last time that it is tried."""

ATTEMPTS = 3
"""At once, before anything is waited for."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
"""Pauses double up to here: a store that is back is noticed soon, and not hammered before."""

NAP_SECONDS = 0.1
"""So late who waits notices that it is to give up."""

_lock = threading.Lock()
_answered: set[str] = set()
_away_since: dict[str, float] = {}
_waits = False
"""No lock and no event: it is set by handlers of signals, which may interrupt who holds one."""
_thread = threading.local()


def _renew_lock() -> None:
    """A process may be forked off while another thread holds it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def waiting() -> Iterator[None]:
    """From here on calls wait, in all threads and in processes that are forked off."""
    global _waits
    _waits = True
    try:
        yield
    finally:
        _waits = False


def give_up() -> None:
    """Who waits now stops, and nobody waits any more: this process was told to end."""
    global _waits
    _waits = False


def handed_over() -> tuple[bool, frozenset[str]]:
    """What a process that is spawned has to be told: whether calls wait, and for which stores."""
    with _lock:
        return _waits, frozenset(_answered)


def take_over(state: tuple[bool, frozenset[str]]) -> None:
    """Be as patient as the process is from which this one was spawned."""
    global _waits
    _waits, known = state
    _answered.update(known)


@contextmanager
def no_retry() -> Iterator[None]:
    """Here this thread does not wait: it asks again by itself, or is on its way out."""
    before = getattr(_thread, "none", False)
    _thread.none = True
    try:
        yield
    finally:
        _thread.none = before


def answered(endpoint: str) -> None:
    """A store has answered, be it with a refusal."""
    with _lock:
        _answered.add(endpoint)
        since = _away_since.pop(endpoint, None)
    if since is not None:
        log.info("the store at %s answers again after %.0f s", endpoint, time.monotonic() - since)


class Retry:
    """Of one call."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._failed = 0
        self._since = 0.0
        self._pause = FIRST_PAUSE_SECONDS

    def again(self, error: Exception, is_away: bool = True) -> bool:
        """Whether to try once more after this failure; waits before it says so.

        is_away: False where the store did answer, and may answer otherwise at once or never."""
        self._failed += 1
        if self._failed == 1:
            self._since = time.monotonic()
        if self._failed < ATTEMPTS:
            return True
        if not is_away or not self._may_wait():
            return False
        if time.monotonic() - self._since >= PATIENCE_SECONDS:
            with _lock:  # nobody waits again for what this one waited for in vain
                _answered.discard(self._endpoint)
                _away_since.pop(self._endpoint, None)
            return False
        self._tell(error)
        until = time.monotonic() + self._pause
        while _waits and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, NAP_SECONDS))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return _waits

    def _may_wait(self) -> bool:
        is_meant = _waits and not getattr(_thread, "none", False)
        return is_meant and self._endpoint in _answered

    def _tell(self, error: Exception) -> None:
        """Once for all who wait."""
        with _lock:
            is_first = self._endpoint not in _away_since
            _away_since.setdefault(self._endpoint, self._since)
        if is_first:
            log.warning(
                "the store at %s does not answer; waiting up to %.0f s for it: %s",
                self._endpoint,
                PATIENCE_SECONDS,
                error,
            )
