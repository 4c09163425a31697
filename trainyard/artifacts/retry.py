"""Retries of calls to a store that answered before and is unavailable now.

The restart of a store or the replacement of a switch takes half a minute. A stage that fails then
loses its unsaved work; one that waits loses half a minute. A store that never answered fails within
seconds: its name or port is wrong.

Only code inside `waiting()` waits, which is the stages; tools report the error at once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""From the first failure of a call to its last retry."""

ATTEMPTS = 3
"""Without a pause, before waiting."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
"""Pauses double up to here: short enough to notice a store that is back, and to spare it before."""

POLL_SECONDS = 0.1
"""A waiting thread notices `give_up` within this time."""

_lock = threading.Lock()
_answered: set[str] = set()
_unavailable_since: dict[str, float] = {}
_waits = False
"""No lock and no event: signal handlers set it, and may interrupt a thread that holds one."""
_thread = threading.local()


def _renew_lock() -> None:
    """A process may be forked while another thread holds the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def waiting() -> Iterator[None]:
    """Inside, calls wait, in all threads and in forked processes."""
    global _waits
    _waits = True
    try:
        yield
    finally:
        _waits = False


def give_up() -> None:
    """Stop all waiting, now and later: this process was signalled to stop."""
    global _waits
    _waits = False


def state_for_child() -> tuple[bool, frozenset[str]]:
    """State for a spawned process: whether calls wait, and for which stores."""
    with _lock:
        return _waits, frozenset(_answered)


def take_over(state: tuple[bool, frozenset[str]]) -> None:
    """Take over the parent's state in a spawned process."""
    global _waits
    _waits, known = state
    _answered.update(known)


@contextmanager
def no_retry() -> Iterator[None]:
    """Inside, this thread does not wait: it retries by other means, or is stopping."""
    before = getattr(_thread, "none", False)
    _thread.none = True
    try:
        yield
    finally:
        _thread.none = before


def answered(endpoint: str) -> None:
    """Record that a store answered, even with a refusal."""
    with _lock:
        _answered.add(endpoint)
        since = _unavailable_since.pop(endpoint, None)
    if since is not None:
        log.info("the store at %s answers again after %.0f s", endpoint, time.monotonic() - since)


class Retry:
    """The retries of one call."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._failed = 0
        self._since = 0.0
        self._pause = FIRST_PAUSE_SECONDS

    def again(self, error: Exception, is_unavailable: bool = True) -> bool:
        """Whether to try once more after this failure; waits before it returns True.

        is_unavailable: False if the store did answer; then it is retried only without a pause."""
        self._failed += 1
        if self._failed == 1:
            self._since = time.monotonic()
        if self._failed < ATTEMPTS:
            return True
        if not is_unavailable or not self._may_wait():
            return False
        if time.monotonic() - self._since >= RETRY_SECONDS:
            with _lock:  # no other call waits for this store again
                _answered.discard(self._endpoint)
                _unavailable_since.pop(self._endpoint, None)
            return False
        self._warn(error)
        until = time.monotonic() + self._pause
        while _waits and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return _waits

    def _may_wait(self) -> bool:
        waits = _waits and not getattr(_thread, "none", False)
        return waits and self._endpoint in _answered

    def _warn(self, error: Exception) -> None:
        """Once for all waiting calls."""
        with _lock:
            is_first = self._endpoint not in _unavailable_since
            _unavailable_since.setdefault(self._endpoint, self._since)
        if is_first:
            log.warning(
                "the store at %s does not answer; waiting up to %.0f s for it: %s",
                self._endpoint,
                RETRY_SECONDS,
                error,
            )
