"""The runs of this process, so that all of their jobs can be stopped."""

from __future__ import annotations

import asyncio
import weakref
from typing import Protocol


class Stoppable(Protocol):
    """A run: it follows a started job (base.StageJobRun)."""

    @property
    def is_stopping_or_ended(self) -> bool:
        """Whether we began to stop the job, or it has ended."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for: the job has ended, or our attempt to stop it has."""

    def begin_stopping(self) -> asyncio.Task[None]:
        """Begin to stop the job, once; the task ends when it has stopped."""


live: weakref.WeakSet[Stoppable] = weakref.WeakSet()
"""The runs of this process whose jobs may still run."""


def stop_all() -> None:
    """Begin to stop every job that is not being stopped yet."""
    for run in list(live):
        if not run.is_stopping_or_ended:
            run.begin_stopping()


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
