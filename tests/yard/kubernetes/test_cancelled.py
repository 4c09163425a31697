"""Cancelled at the worst moments, and started again: no pod left behind, and a job that is new."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from flows.backends.outcome import Kind
from flows.backends.run_folder import job_key
from flows.backends.spec import LaunchSpec
from flows.recipes.stage_job import StageJob, stage_job
from flows.recipes.summary import Summary
from flows.runner.stage_task import run_stage_task
from flows.runner.submission import SETTLED
from flows.yard.profile import StageEnvironment
from tests.yard.faults import faults as trainings
from tests.yard.jobs import FLOW_RUN, MODEL
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.kube import job, profile_on_pods, site, training
from tests.yard.operator.deployed import Api, register, working
from tests.yard.operator.deployed import comes as holds
from tests.yard.yard import ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]


async def comes(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def jobs(fake: FakeKube, name: str) -> list[str]:
    found = (one["metadata"]["name"] for one in fake.all("jobs"))
    return [one for one in found if name in one]


def test_cancelling_during_creation_leaves_no_job(fake: FakeKube, tmp_path: Path) -> None:
    def is_created() -> bool:
        return any("POST" in verb and path.endswith("/jobs") for verb, path in fake.asked)

    async def whole() -> None:
        triggering = asyncio.create_task(job(fake, tmp_path, "early-1", training()).trigger())
        await comes(lambda: is_created() or triggering.done())
        triggering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await triggering

    asyncio.run(whole())
    assert jobs(fake, "early-1") == []


def left_open(fake: FakeKube) -> list[object]:
    """Tasks of this program besides the one that asks, and what the server still serves to it."""
    mine = asyncio.current_task()
    tasks: list[object] = [task for task in asyncio.all_tasks() if task is not mine]
    return [*tasks, *(["a stream"] * fake.streams())]


@pytest.mark.parametrize("waits", [False, True], ids=["nobody waits yet", "somebody waits"])
def test_a_stopped_job_leaves_no_watches(fake: FakeKube, tmp_path: Path, waits: bool) -> None:
    """A flow may be cancelled between the two, when it shows what was submitted."""

    async def whole() -> None:
        run = await job(fake, tmp_path, f"watched-{int(waits)}", training()).trigger()
        waiting = [asyncio.create_task(run.wait_for_completion())] if waits else []
        await comes(lambda: fake.streams() >= 2)
        await run.stop()
        await asyncio.gather(*waiting)
        assert (await run.fetch_result()).kind is Kind.STOPPED
        await comes(lambda: not left_open(fake))

    before = threading.active_count()
    asyncio.run(whole())
    assert threading.active_count() <= before
    assert jobs(fake, "watched") == []


def test_cancelled_on_page(fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)
    shows = asyncio.Event()

    async def show_for_long(spec: LaunchSpec) -> None:
        shows.set()
        await asyncio.sleep(60)

    monkeypatch.setattr("flows.runner.submission.show_submitted", show_for_long)
    place = StageEnvironment(
        run_folder=str(tmp_path / "runs"),
        backend="kubernetes",
        image="yard/cpu:1",
        kubernetes=site(fake, tmp_path),
    )

    async def whole() -> None:
        running = asyncio.create_task(run_stage_task.fn(plan(tmp_path), place))
        await asyncio.wait_for(shows.wait(), 60)
        await comes(lambda: fake.streams() >= 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await comes(lambda: not left_open(fake))

    with disable_run_logger():
        asyncio.run(whole())
    assert jobs(fake, "plan") == []


def plan(folder: Path) -> StageJob:
    document = {**MODEL, "vocab_size": 300, "output_dir": str(folder / "plan")}
    return stage_job("plan", document, "test")


def test_retry_has_new_job(fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Cancel, and then Retry, in Prefect's pages do, with the same flow run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)
    runs = tmp_path / "runs"
    place = StageEnvironment(
        run_folder=str(runs),
        backend="kubernetes",
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


# --- through a worker -----------------------------------------------------------------------------

STOP_SECONDS = 30
"""From the command to the end of all: so long a worker waits before it kills a flow."""

PROGRAM = """#!/bin/sh
trap '{heeds}' TERM
echo begun
while :; do sleep 0.2; done
"""
HEEDS = {"saves": "echo asked to stop; exit 143", "pays no heed": ""}
"""What it does when it is stopped; nothing, as where a rank hangs in a collective."""


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("heeds", ["saves", "pays no heed"])
def test_a_run_of_a_worker_that_is_cancelled_is_over_in_30_seconds(
    fake: FakeKube, tmp_path: Path, prefect_api: dict[str, str], heeds: str
) -> None:
    python = tmp_path / "python"
    python.write_text(PROGRAM.format(heeds=HEEDS[heeds]))
    python.chmod(0o755)
    profile = tmp_path / "pods.toml"
    offered = 'deployments = ["run-stage"]\n'
    two = "[resources.pretrain]\nnodes = 2\n"
    profile.write_text(offered + profile_on_pods(fake, tmp_path, str(python)) + two)
    yard = Yard(tmp_path, {**prefect_api, "PREFECT_HOME": str(tmp_path / "client")})
    register(yard, str(profile))
    server = Api(prefect_api["PREFECT_API_URL"])
    document = trainings.training(tmp_path, str(tmp_path / "save"), 100_000)
    before = names(fake)
    with working(yard, "pods") as worker:
        run = server.begin("run-stage/pods", stage="pretrain", config=document)
        assert holds(90, lambda: trainings.logs(tmp_path).count("begun") == 2), worker.output
        assert {kind for kind, _ in names(fake) - before} == {"jobs", "services", "pods"}
        pressed = time.monotonic()
        cancelled = yard.run("-m", "prefect", "flow-run", "cancel", run)
        assert cancelled.status == 0, cancelled.err
        assert holds(STOP_SECONDS, lambda: not names(fake) - before), worker.output
        assert time.monotonic() - pressed < STOP_SECONDS
        # Prefect's own word for it comes up to three seconds after the flow has ended, and then
        # loads the flow to look for hooks, which a slow machine takes its time for.
        assert holds(STOP_SECONDS, lambda: server.state(run) == "CANCELLED"), worker.output
    saved = trainings.logs(tmp_path).count("asked to stop")
    assert saved == (2 if heeds == "saves" else 0)


def names(fake: FakeKube) -> set[tuple[str, str]]:
    """Every object of the namespace."""
    kinds = ("jobs", "services", "pods")
    return {(kind, one["metadata"]["name"]) for kind in kinds for one in fake.all(kind)}
