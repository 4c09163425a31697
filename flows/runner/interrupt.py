"""Signals that stop a flow, and the jobs under it, whatever Prefect and asyncio make of them.

asyncio turns the first SIGINT into one cancellation of the flow. Where that reaches a task at an
unlucky moment it is lost, and the training goes on. A few seconds later the jobs that nobody has
told are therefore stopped by themselves; the flow ends with them.

Prefect tells its server how the flow ended, and asks again for minutes where that answers with
errors. Whoever typed the flow waits no longer than `FAREWELL_SECONDS` for that, once nothing of it
runs any more."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from flows.backends.live_jobs import live, stop_untold

LOST_SECONDS = 3.0
"""By then a cancellation that was not lost has reached every job."""
FAREWELL_SECONDS = 15.0
"""For how long the server may be told of an end that a signal made, without a job that runs."""
LOOK_SECONDS = 0.5

_told: list[signal.Signals] = []
_is_typed = threading.Event()


def told_to_stop() -> signal.Signals | None:
    """The first signal that was to stop this program; SIGTERM only where `end_in_time` was asked
    for."""
    return _told[0] if _told else None


def end_in_time() -> None:
    """Let a signal end this program although Prefect's server does not hear of it; for programs
    that run one flow and nothing else."""
    _is_typed.set()
    # From the start: a signal may come while the main thread is about to start another.
    threading.Thread(target=_see_off, name="farewell", daemon=True).start()


def heed_interrupt() -> None:
    """Watch for signals for as long as the running loop runs; of use in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    def lost() -> None:
        loop.call_soon_threadsafe(loop.call_later, LOST_SECONDS, stop_untold)

    _wrap(signal.SIGINT, lost)
    # A worker's runner asks whether the handler is Prefect's own, and before a flow there is none.
    if _is_typed.is_set() and callable(signal.getsignal(signal.SIGTERM)):
        _wrap(signal.SIGTERM, lambda: None)


def _wrap(number: signal.Signals, act: Callable[[], None]) -> None:
    """Let something happen at a signal before what happens anyway."""
    before = signal.getsignal(number)

    def handle(received: int, frame: FrameType | None) -> None:
        act()
        _told.append(number)
        if callable(before):
            before(received, frame)

    signal.signal(number, handle)


def _see_off() -> None:
    """After a signal end this program, if it has not ended by itself a while after its last job."""
    while not _told:
        time.sleep(LOOK_SECONDS)
    number = _told[0]
    since = time.monotonic()
    while time.monotonic() - since < FAREWELL_SECONDS:
        time.sleep(LOOK_SECONDS)
        if not all(job.is_over for job in list(live)):
            since = time.monotonic()
    print(
        f"stopped by {number.name}; Prefect's server could not be told within "
        f"{FAREWELL_SECONDS:.0f} s. Run it again to go on from here",
        file=sys.stderr,
        flush=True,
    )
    os._exit(128 + number)  # what waits for the server cannot be asked to give up
