"""The container block on a real engine: stopped in time, found again, never started twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.backends.container import job as container_job
from flows.backends.container.job import ContainerJob, ContainerJobRun
from flows.backends.container.options import ContainerOptions
from flows.backends.outcome import Kind, Outcome
from tests.yard.container.containers import (
    SECONDS,
    containers,
    counting,
    docker,
    follow,
    job,
    steps_of,
    text_of,
    until,
)
from tests.yard.faults.wire import Wire
from tests.yard.yard import ROOT
from trainyard.errors import InfrastructureError

pytestmark = [pytest.mark.yard, pytest.mark.timeout(180)]


# --- stopped by us --------------------------------------------------------------------------------


def cancelled_after_a_step(block: ContainerJob) -> float:
    """Cancel the waiting once the log has a step; the seconds that this takes."""

    async def whole() -> float:
        run = await block.trigger()
        waiting = asyncio.create_task(run.wait_for_completion())
        await asyncio.sleep(0)  # a task that has not begun would end at once, and stop nothing
        await until(lambda: "step 1\n" in text_of(block))
        began = time.monotonic()
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return time.monotonic() - began

    return asyncio.run(whole())


def test_cancelled_container_has_time_to_save(tmp_path: Path, key: str, image: str) -> None:
    block = job(tmp_path, key, image, counting())
    assert cancelled_after_a_step(block) < 10
    assert "stopped by SIGTERM" in text_of(block)
    assert containers(key) == []


def test_container_is_killed_after_the_grace(tmp_path: Path, key: str, image: str) -> None:
    deaf = counting().replace("raise SystemExit(128 + number)", "pass")
    took = cancelled_after_a_step(job(tmp_path, key, image, deaf, grace_seconds=1))
    assert 1 <= took < 15
    assert containers(key) == []


def test_cancelling_during_the_start_leaves_none(tmp_path: Path, key: str, image: str) -> None:
    async def whole() -> None:
        starting = asyncio.create_task(job(tmp_path, key, image, counting()).trigger())
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(whole())
    assert containers(key) == []


# --- found again ----------------------------------------------------------------------------------

FLOW = """
import sys
from pathlib import Path
from tests.yard.container.containers import follow, job
folder, key, image, code = sys.argv[1:]
follow(job(Path(folder), key, image, code))
"""


def test_killed_flow_finds_its_container(tmp_path: Path, key: str, image: str) -> None:
    block = job(tmp_path, key, image, counting(100))
    program = [sys.executable, "-c", FLOW, str(tmp_path), key, image, counting(100)]
    with subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL) as flow:
        deadline = time.monotonic() + SECONDS
        while len(steps_of(block)) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        flow.send_signal(signal.SIGKILL)
    (before,) = containers(key)
    run, outcome = follow(block)
    assert (run.container_id, outcome.kind) == (before, Kind.DONE)
    assert steps_of(block) == list(range(100))
    assert text_of(block, "starts") == "start\n"


def test_two_flows_of_one_key_share_a_container(tmp_path: Path, key: str, image: str) -> None:
    block = job(tmp_path, key, image, counting(20))

    async def one() -> Outcome:
        run = await block.trigger()
        await run.wait_for_completion()
        return await run.fetch_result()

    async def both() -> list[Outcome]:
        return list(await asyncio.gather(one(), one()))

    first, second = asyncio.run(both())
    assert first == second
    assert first.kind is Kind.DONE, first
    assert steps_of(block) == list(range(20))
    assert text_of(block, "starts") == "start\n"


def test_an_ended_container_is_not_started_again(tmp_path: Path, key: str, image: str) -> None:
    block = job(tmp_path, key, image, "import os; print('once'); os._exit(3)")
    first, second = follow(block)[1], follow(block)[1]
    assert first == second
    assert text_of(block) == "once\n"


def test_a_removed_container_is_not_started_again(tmp_path: Path, key: str, image: str) -> None:
    block = job(tmp_path, key, image, counting())

    async def left_alone() -> None:
        await block.trigger()
        await until(lambda: "step 1\n" in text_of(block))

    asyncio.run(left_alone())
    docker("rm", "--force", *containers(key))
    outcome = follow(block)[1]
    assert (outcome.kind, outcome.is_retryable) == (Kind.UNKNOWN, False)
    assert "it was removed" in outcome.message
    assert text_of(block, "starts") == "start\n"


# --- an engine that goes away ---------------------------------------------------------------------


def test_absent_engine_costs_nothing(tmp_path: Path, key: str, image: str) -> None:
    wire = Wire(os.environ["DOCKER_HOST"], tmp_path)
    options = ContainerOptions(pull="never", engine=wire.address)
    block = job(tmp_path, key, image, counting(60), options=options, poll_seconds=0.2)

    async def meanwhile(run: ContainerJobRun) -> None:
        await until(lambda: "step 5\n" in text_of(block))
        wire.cut()
        await asyncio.sleep(1.5)
        wire.mend()

    assert follow(block, meanwhile)[1].kind is Kind.DONE
    assert steps_of(block) == list(range(60))


def test_an_unavailable_engine_ends_the_waiting_and_not_the_container(
    tmp_path: Path, key: str, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_job, "AWAY_SECONDS", 0.5)
    wire = Wire(os.environ["DOCKER_HOST"], tmp_path)
    options = ContainerOptions(pull="never", engine=wire.address)
    block = job(tmp_path, key, image, counting(80), options=options, poll_seconds=0.2)

    async def broken() -> None:
        run = await block.trigger()
        await until(lambda: "step 5\n" in text_of(block))
        wire.cut()
        with pytest.raises(InfrastructureError, match="does not answer"):
            await run.wait_for_completion()

    asyncio.run(broken())
    wire.mend()
    assert follow(block)[1].kind is Kind.DONE
    assert steps_of(block) == list(range(80))
    assert text_of(block, "starts") == "start\n"
