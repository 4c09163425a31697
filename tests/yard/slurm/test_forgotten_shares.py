"""Shares that Slurm forgets seconds after their end (MinJobAge), and long lists of tasks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm.client import SlurmClient
from flows.backends.slurm.job import FORGOTTEN_SECONDS, SlurmJobRun
from flows.backends.slurm.options import SlurmOptions
from flows.backends.spec import Shares
from tests.yard.jobs import follow, wait_until
from tests.yard.slurm.cluster import Cluster, ask, job

pytestmark = [pytest.mark.yard, pytest.mark.timeout(180)]

ONE_IS_KILLED = """
import os, pathlib, subprocess, sys, time
if sys.argv[2] == "0":
    subprocess.run(["scancel", "--batch", "--signal=KILL", os.environ["SLURM_JOB_ID"]])
    time.sleep(60)
while not pathlib.Path(FILE).exists():
    time.sleep(0.1)
"""
"""The script of share 0 dies without an exit file; the others wait."""


@pytest.mark.full
def test_an_early_failure_of_a_share_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = ONE_IS_KILLED.replace("FILE", repr(str(go)))
    went: list[float] = []

    async def meanwhile(run: SlurmJobRun) -> None:
        def is_forgotten() -> bool:
            answer = ask("scontrol", "show", "job", "--oneliner", run.job_id)
            return "ArrayTaskId=1" in answer and "ArrayTaskId=0 " not in answer

        def has_ended() -> bool:
            return "FAILED" in ask("scontrol", "show", "job", "--oneliner", run.job_id)

        await asyncio.to_thread(wait_until, has_ended)
        await asyncio.to_thread(wait_until, is_forgotten)
        went.append(time.monotonic())
        go.touch()

    with cluster.forgetting(seconds=2):
        outcome = follow(job(tmp_path, "forgotten-1", code, shares=Shares(count=3)), meanwhile)[1]
    assert (outcome.is_retryable, outcome.failed_shares) == (True, (0,)), outcome
    assert time.monotonic() - went[0] < FORGOTTEN_SECONDS / 2


@pytest.mark.usefixtures("cluster")
def test_a_long_list_of_shares_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_BITSTR_LEN", "64")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    odd = tuple(index * index for index in range(30))
    shares = Shares(count=1000, only=odd, at_once=4)
    held = job(tmp_path, "list-1", "pass", shares=shares, options=SlurmOptions(extra=("--hold",)))

    async def look() -> None:
        run = await held.trigger()
        client = SlurmClient()
        try:
            (record,) = client.records(run.job_id)
            assert record.shares == odd
            client.cancel(run.job_id)
            await run.wait_for_completion()
            ended = client.records(run.job_id)
            assert {index for record in ended for index in record.shares} == set(odd)
            assert all(record.ended is not None for record in ended)
        finally:
            client.cancel(run.job_id)
        assert (await run.fetch_result()).kind is Kind.STOPPED

    asyncio.run(look())
