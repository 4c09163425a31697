"""The jobs that this process waits for, so that all of them can be stopped, and stopping seen
through."""

from __future__ import annotations

import asyncio
import weakref
from typing import Protocol


class Stoppable(Protocol):
    """A started job."""

    @property
    def is_being_stopped(self) -> bool:
        """True once it was told to stop, or has ended."""

    @property
    def is_over(self) -> bool:
        """True once it has ended, or stopping it has, as far as this process knows."""

    def begin_stopping(self) -> asyncio.Task[None]:
        """Tell it to stop, unless it was told; the task ends when it has."""


live: weakref.WeakSet[Stoppable] = weakref.WeakSet()
"""The jobs of this process that may still run."""


def stop_untold() -> None:
    """Stop every job that runs and that nobody has told to stop."""
    for job in list(live):
        if not job.is_being_stopped:
            job.begin_stopping()


async def wait_uncancelled(stopping: asyncio.Task[None]) -> None:
    """Until the stopping is over, however often this is cancelled meanwhile.

    A task of a flow that stops is cancelled several times over."""
    cancelled: asyncio.CancelledError | None = None
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    stopping.result()
