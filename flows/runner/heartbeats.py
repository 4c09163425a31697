"""Ends the heartbeats of a flow run before its end is reported.

Prefect sends heartbeats in the background. One that reaches the server after the end, as the first
of a run that ends at once, begins the wait of the automation for silent runs again. Two minutes
later that would try to mark the finished run as crashed."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow_engine
from prefect.context import FlowRunContext
from prefect.events.worker import EventsWorker

SEND_SECONDS = 5.0
"""Limit for what is being sent."""
HANDLE_SECONDS = 1.0
"""The server handles events side by side, so one that follows sooner may overtake."""


async def end_heartbeats() -> None:
    """Send no further heartbeat, and wait until the server has handled the last one."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return  # no automation knows the run
    setattr(flow_engine, "emit_event", _emit_nothing)  # noqa: B010  (mypy refuses an assignment)
    await asyncio.to_thread(EventsWorker.drain_all, SEND_SECONDS, at_exit=False)
    await asyncio.sleep(HANDLE_SECONDS)


def _emit_nothing(**_: Any) -> None:
    """Takes the place of Prefect's function, which the engine only calls for heartbeats."""
