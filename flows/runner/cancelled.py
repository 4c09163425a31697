"""A flow that looks itself whether its run was cancelled in Prefect, and then stops.

A worker is told of that by the server, and stops listening for good once the server was away for
half a minute; a flow that somebody started by hand has no worker at all. Its training would go on
after the run has long been marked as cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from flows.backends.live_jobs import stop_untold
from flows.runner.interrupt import LOST_SECONDS

LOOK_SECONDS = 5.0
"""Between two looks at the run."""
ANSWER_SECONDS = 10.0
"""Within which the server answers. Prefect's client tries again for minutes, with pauses that grow:
too long to hear in time of what was cancelled when the server is there again."""
AGAIN_SECONDS = 1.0
"""After a look that found no server."""

CANCELLED = "Cancelled in Prefect; its jobs were stopped."

R = TypeVar("R")

log = logging.getLogger(__name__)


async def heed_cancel(run: Coroutine[Any, Any, R]) -> R:
    """What a flow's function returns; that of a run which is cancelled meanwhile is cancelled, as
    by a SIGTERM, and the state Cancelled returned in the place of a result."""
    flow, flow_run = asyncio.current_task(), runtime.flow_run.id
    if flow is None or not flow_run:
        return await run
    looking = asyncio.create_task(_until_cancelled(UUID(str(flow_run))))
    # However it ended: a SIGTERM that comes while it runs ends it, and nobody else.
    looking.add_done_callback(lambda done: None if done.cancelled() else _stop(flow))
    try:
        return await run
    except (Exception, asyncio.CancelledError, TerminationSignal):
        if not _has_seen_it(looking):
            raise
        while flow.uncancel():
            pass
        return cast(R, Cancelled(message=CANCELLED))
    finally:
        looking.cancel()


def _has_seen_it(looking: asyncio.Task[None]) -> bool:
    return looking.done() and not looking.cancelled() and looking.exception() is None


def _stop(flow: asyncio.Task[Any]) -> None:
    """Cancel the flow; the jobs that this does not reach a few seconds later by themselves."""
    if flow.done() or flow.cancelling():  # a worker was quicker
        return
    flow.cancel()
    flow.get_loop().call_later(LOST_SECONDS, stop_untold)


async def _until_cancelled(flow_run: UUID) -> None:
    """Look until somebody has cancelled the run."""
    while True:
        pause = LOOK_SECONDS
        try:
            async with asyncio.timeout(ANSWER_SECONDS), get_client() as client:
                state = (await client.read_flow_run(flow_run)).state
        except Exception as error:  # whatever it is, the next look may find the server well
            log.debug("the state of flow run %s is not known: %s", flow_run, error)
            pause = AGAIN_SECONDS
        else:
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                get_run_logger().info("cancelled in Prefect: stopping")
                return
        await asyncio.sleep(pause)
