"""A Ctrl-C that stops the jobs, whatever became of the cancellation that asyncio made of it.

asyncio turns the first SIGINT into one cancellation of the flow. Where that reaches a task at an
unlucky moment it is lost, and the training goes on. A few seconds later the jobs that nobody has
told are therefore stopped by themselves; the flow ends with them."""

from __future__ import annotations

import asyncio
import signal
import threading
from types import FrameType

from flows.blocks.live import stop_untold

LOST_SECONDS = 3.0
"""By then a cancellation that was not lost has reached every job."""

_interrupted = threading.Event()


def interrupted() -> bool:
    """True after a SIGINT."""
    return _interrupted.is_set()


def heed_interrupt() -> None:
    """Watch for SIGINT for as long as the running loop runs; of use in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        _interrupted.set()
        loop.call_soon_threadsafe(loop.call_later, LOST_SECONDS, stop_untold)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
