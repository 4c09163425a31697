"""Prefect's `worker start`, which prints one line when its server is away and one when it is back,
and reports each crash of a flow run once.

Prefect alone prints a traceback from each of its loops, stops listening for cancelled runs after
half a minute, and ends after some minutes. Here the loops continue until the server answers.
Prefect also reports a crash a second time, some seconds later, which undid a Retry pressed
meanwhile. `command` starts this program."""

from __future__ import annotations

import sys
from typing import Any
from uuid import UUID

from prefect._internal import observers
from prefect.client.schemas.objects import FlowRun, State
from prefect.runner import _scheduled_run_poller
from prefect.runner._state_proposer import StateProposer
from prefect.workers import base
from prefect.workers.base import BaseWorker

from flows.server.outage import print_line, tolerate_outages


def main() -> None:
    """Run Prefect's command with the arguments of this program."""
    from prefect.cli import app

    tolerate_outages(print_line, (observers, _scheduled_run_poller, base))
    report_crashes_once()
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


def report_crashes_once() -> None:
    """Change Prefect's worker in this program: it leaves out a crash that its runner, the part that
    waits for the flow's process, has reported."""
    by_runner, by_worker = StateProposer.propose_crashed, BaseWorker._propose_crashed_state
    reported: set[UUID] = set()

    async def first(self: StateProposer, flow_run: FlowRun, message: str) -> State[Any] | None:
        reported.discard(flow_run.id)  # an earlier attempt of the same run
        state = await by_runner(self, flow_run, message)
        if state is not None:
            reported.add(flow_run.id)
        return state

    async def second(self: Any, flow_run: FlowRun, *given: Any, **options: Any) -> None:
        if flow_run.id in reported:
            reported.discard(flow_run.id)
        else:
            await by_worker(self, flow_run, *given, **options)

    setattr(StateProposer, "propose_crashed", first)  # noqa: B010
    setattr(BaseWorker, "_propose_crashed_state", second)  # noqa: B010


if __name__ == "__main__":
    main()
