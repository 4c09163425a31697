"""Shows that a flow run waits, and for what, as the name of its state: `Waits for a slot`.

The type of the state stays Running, and the server does not count it as another start of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from trainyard.logging import printable, shortened

if TYPE_CHECKING:  # the command line of a flow has this module before Prefect's environment is set
    from prefect.client.schemas.objects import FlowRun

SETTLE_SECONDS = 1.0
"""A wait that is over by then is not shown."""

LOCK, SLOT, STORE = "Waits for the lock", "Waits for a slot", "Waits for the store"
OTHER_RUN, RETRY = "Waits for another run", "Waits to retry"

log = logging.getLogger(__name__)


class WaitState:
    """The waits of one flow run. It waits while one of its jobs does and none works."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[str, str]] = {}
        self._working: set[str] = set()
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def working(self, job: str) -> Iterator[None]:
        """A job works inside, unless it waits."""
        self._working.add(job)
        self._changed.set()
        try:
            yield
        finally:
            self._working.discard(job)
            self._changed.set()

    def wait(self, job: str, state: str, why: str) -> None:
        """A job waits from now on; state: a name for the state, such as SLOT."""
        self._waits[job] = (state, why)
        self._changed.set()

    def end_wait(self, job: str) -> None:
        """A job waits no more, if it did."""
        if self._waits.pop(job, None) is not None:
            self._changed.set()

    @property
    def state(self) -> tuple[str, str]:
        """Name and message of the flow run's state."""
        if self._waits and self._working <= self._waits.keys():
            job, (name, why) = next(iter(self._waits.items()))
            return name, f"{job}: {why}"
        return "Running", ""

    async def show(self, run: FlowRun) -> None:
        """Keep the state of the flow run as it is here, until this is cancelled."""
        shown = self.state
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._changed.clear()
            if self.state == shown:
                continue
            state = self.state
            try:
                await _set_state(run, *state)
            except Exception as error:  # the run itself continues
                log.debug("the state of the flow run was not shown: %s", error)
            else:
                shown = state


async def _set_state(run: FlowRun, name: str, message: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    # The server counts each start of a run, and automations restart few of them. It does not count
    # those of a run that resumes.
    policy = run.empirical_policy.model_copy(update={"resuming": True})
    async with get_client() as client:
        await client.update_flow_run(run.id, empirical_policy=policy)
        message = printable(shortened(message))
        await client.set_flow_run_state(run.id, Running(name=name, message=message or None))


_current: ContextVar[WaitState | None] = ContextVar("wait state", default=None)


def wait_state() -> WaitState:
    """That of the running flow; outside of a flow, one that is not shown."""
    return _current.get() or WaitState()


@contextlib.asynccontextmanager
async def shown_waits() -> AsyncIterator[None]:
    """Show the waits of the flow run inside."""
    from prefect.context import FlowRunContext

    context, state = FlowRunContext.get(), WaitState()
    if context is None or context.flow_run is None:
        yield
        return
    _current.set(state)
    showing = asyncio.create_task(state.show(context.flow_run))
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait([showing])
