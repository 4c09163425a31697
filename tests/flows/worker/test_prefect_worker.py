"""What our worker changes in Prefect's."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.runner._state_proposer import StateProposer
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker

from flows.worker.prefect_worker import report_crashes_once


@pytest.mark.parametrize("answers", [True, False], ids=["server", "no server"])
def test_a_crash_is_reported_once(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """A second report, seconds later, would undo a Retry."""
    reported: list[str] = []

    async def by_runner(self: object, flow_run: FlowRun, message: str) -> State | None:
        reported.append("runner")
        return Crashed() if answers else None

    async def by_worker(self: object, flow_run: FlowRun, message: str) -> None:
        reported.append("worker")

    monkeypatch.setattr(StateProposer, "propose_crashed", by_runner)
    monkeypatch.setattr("prefect.workers.base.BaseWorker._propose_crashed_state", by_worker)
    report_crashes_once()
    run = FlowRun.model_construct(id=uuid4())

    async def crash() -> None:
        await StateProposer(client=None).propose_crashed(run, "killed")  # type: ignore[arg-type]
        worker = ProcessWorker.__new__(ProcessWorker)
        await worker._propose_crashed_state(run, "killed")

    asyncio.run(crash())
    assert reported == (["runner"] if answers else ["runner", "worker"])
    asyncio.run(ProcessWorker.__new__(ProcessWorker)._propose_crashed_state(run, "cannot start"))
    assert reported[-1] == "worker"
