"""The jobs that this process waits for, so that all of them can be stopped."""

from __future__ import annotations

import asyncio
import weakref
from typing import Protocol


class Stoppable(Protocol):
    """A started job."""

    @property
    def is_being_stopped(self) -> bool:
        """True once stopping has begun, or it has ended."""

    @property
    def is_over(self) -> bool:
        """True once it has ended, or stopping it has, as far as this process knows."""

    def begin_stopping(self) -> asyncio.Task[None]:
        """Begin to stop it, once; the task ends when it has stopped."""


live: weakref.WeakSet[Stoppable] = weakref.WeakSet()
"""The jobs of this process that may still run."""


def stop_all() -> None:
    """Begin to stop every job that is not being stopped yet."""
    for job in list(live):
        if not job.is_being_stopped:
            job.begin_stopping()


async def wait_uncancelled(stopping: asyncio.Task[None]) -> None:
    """Wait for a task, then raise CancelledError if this was cancelled in the meantime.

    Prefect cancels a task of a stopping flow several times."""
    cancelled: asyncio.CancelledError | None = None
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    stopping.result()
