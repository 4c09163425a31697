"""Cancelled at the worst moments, and started again: no pod left behind, and a job that is new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from flows.job import StageJob, stage_job
from flows.launch.key import job_key
from flows.place import Place
from flows.stage_task import SETTLED, Summary, run_stage_task
from tests.yard.fake_kube import FakeKube
from tests.yard.kube import job, site, training
from tests.yard.test_slurm_stages import FLOW_RUN, MODEL
from tests.yard.yard import ROOT

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]


async def comes(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def jobs(fake: FakeKube, name: str) -> list[str]:
    found = (one["metadata"]["name"] for one in fake.all("jobs"))
    return [one for one in found if name in one]


def is_being_made(fake: FakeKube) -> bool:
    """True as soon as the server is asked to make a job."""
    return any("POST" in told and path.endswith("/jobs") for told, path in fake.asked)


def test_being_cancelled_while_the_job_is_created_leaves_none(
    fake: FakeKube, tmp_path: Path
) -> None:
    async def whole() -> None:
        triggering = asyncio.create_task(job(fake, tmp_path, "early-1", training()).trigger())
        await comes(lambda: is_being_made(fake) or triggering.done())
        triggering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await triggering

    asyncio.run(whole())
    assert jobs(fake, "early-1") == []


def plan(folder: Path) -> StageJob:
    document = {**MODEL, "vocab_size": 300, "output_dir": str(folder / "plan")}
    return stage_job("plan", document, "test")


def test_a_stage_that_was_cancelled_runs_as_another_job_when_it_is_started_again(
    fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Cancel, and then Retry, in Prefect's pages do, with the same flow run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)
    runs = tmp_path / "runs"
    place = Place(
        run_folder=str(runs),
        block="kubernetes",
        image="yard/cpu:1",
        kubernetes=site(fake, tmp_path),
    )
    first, second = (job_key(FLOW_RUN, str(runs / "plan"), count) for count in (1, 2))

    async def cancelled() -> None:
        running = asyncio.create_task(run_stage_task.fn(plan(tmp_path), place))
        await comes(lambda: jobs(fake, first) or running.done())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def again() -> Summary:
        return await run_stage_task.fn(plan(tmp_path), place)

    with disable_run_logger():
        asyncio.run(cancelled())
        assert jobs(fake, first) == []
        assert (runs / "plan" / first / SETTLED).exists()
        assert asyncio.run(again()).output_digest
    assert (runs / "plan" / second / SETTLED).exists()
