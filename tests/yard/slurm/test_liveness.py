"""What others do to a job on a real Slurm, and by what signs it is known to live."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.run_folder import SUBMITTED
from flows.backends.slurm.job import SlurmJobRun
from flows.backends.slurm.options import SlurmOptions
from tests.yard.jobs import follow, wait_until
from tests.yard.slurm.cluster import Cluster, ask, job

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(180)]

BEATS_SECONDS, HANG_SECONDS = 8, 4.0
BEATING = f"""
import os, pathlib, time
beat = pathlib.Path(os.environ["TRAINYARD_RUN_DIR"], "heartbeat")
until = time.monotonic() + {BEATS_SECONDS}
while time.monotonic() < until:
    beat.touch()
    time.sleep(0.2)
"""


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """For the runs of a test; seen by every node."""
    return tmp_path


def test_a_heartbeat_is_a_sign_of_life(folder: Path) -> None:
    block = job(folder, "beats-1", BEATING, hang_seconds=HANG_SECONDS)
    assert follow(block)[1].kind is Kind.DONE


def test_a_heartbeat_that_stops_does_not_count(folder: Path) -> None:
    code = BEATING + "time.sleep(600)"
    began = time.monotonic()
    outcome = follow(job(folder, "beats-2", code, hang_seconds=HANG_SECONDS))[1]
    assert (outcome.kind, outcome.is_retryable) == (Kind.HANG, True)
    assert time.monotonic() - began > BEATS_SECONDS + HANG_SECONDS


def test_scancel_of_a_waiting_job_by_a_person_is_not_retried(folder: Path) -> None:
    block = job(folder, "scancel-3", "pass", options=SlurmOptions(extra=("--hold",)))

    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(wait_until, Path(block.spec.run_directory, SUBMITTED).exists)
        await asyncio.to_thread(ask, "scancel", run.job_id)

    outcome = follow(block, meanwhile)[1]
    assert (outcome.kind, outcome.is_retryable) == (Kind.STOPPED, False)
    assert not Path(block.spec.run_directory, "log.txt").exists()
