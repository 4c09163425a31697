"""A flow says that the controller of a real Slurm does not answer, and when it is back."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path

import pytest

from flows.backends.outcome import Kind, Outcome
from flows.backends.slurm.job import SlurmJob
from flows.runner import submission
from flows.yard.profile import StageEnvironment
from tests.yard.jobs import wait_until
from tests.yard.slurm.cluster import Cluster, job

pytestmark = [pytest.mark.yard, pytest.mark.timeout(240)]

COUNTING = """
import time
for step in range(20):
    print("step", step, flush=True)
    time.sleep(1)
"""
REPORTED_SECONDS = 30
"""Slurm's programs try for a while before they fail; most of it is room for a busy machine."""


def test_a_controller_that_is_down_is_reported_within_seconds(
    cluster: Cluster,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block: SlurmJob = job(tmp_path, "silent-1", COUNTING)
    monkeypatch.setitem(submission.JOB_BLOCKS, "slurm", lambda place, spec, stage: block)
    monkeypatch.setattr(submission, "get_run_logger", lambda: logging.getLogger("followed"))
    log = Path(block.spec.run_directory, "log.txt")

    def headlines(state: str) -> list[str]:
        found = (one for one in caplog.records if getattr(one, "headline", "") == state)
        return [one.getMessage() for one in found]

    def relayed() -> list[str]:
        return [one for one in map(str, caplog.messages) if one.startswith("step ")]

    def trouble() -> None:
        wait_until(lambda: log.exists() and "step 2" in log.read_text())
        os.kill(int((cluster.folder / "run/slurmctld.pid").read_text()), signal.SIGTERM)
        try:
            began = time.monotonic()
            wait_until(lambda: headlines("waits"))
            assert time.monotonic() - began < REPORTED_SECONDS
            read = len(relayed())
            wait_until(lambda: len(relayed()) > read)  # the job's log is read all the same
            assert not headlines("runs")
        finally:
            cluster.up(wait=False)

    async def whole() -> Outcome:
        place = StageEnvironment(run_folder=str(tmp_path), backend="slurm")
        async with asyncio.TaskGroup() as group:
            following = group.create_task(submission.follow("job", place, block.spec))
            group.create_task(asyncio.to_thread(trouble))
        return following.result()

    with caplog.at_level(logging.INFO, "followed"):
        assert asyncio.run(whole()).kind is Kind.DONE, caplog.text
    (waits,) = headlines("waits")
    assert "Slurm's controller has not answered since" in waits
    assert "its job cannot be seen, and may still run" in waits
    (seen,) = headlines("runs")
    assert "Slurm's controller answers again, after" in seen
    assert log.read_text().count("step ") == 20
