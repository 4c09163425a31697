"""Ranks that scancel ends before they have anything to save do not wait for KillWait."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm.job import SlurmJob, SlurmJobRun
from flows.backends.spec import Resources
from tests.yard.faults.faults import training
from tests.yard.jobs import TORCHRUN, follow, wait_until
from tests.yard.slurm.cluster import ask, job
from tests.yard.yard import ROOT

pytestmark = [pytest.mark.yard, pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]

GONE_SECONDS = 28
"""KillWait is 30 s. Of two nodes one that has failed leaves the other 10 s, and torchrun takes as
many to see that another one is gone."""

IMPORTS = """
import os, time
os.write(1, b"importing torch\\n")
time.sleep(600)
"""
"""A torch on a slow disk."""


@pytest.fixture
def slowly(tmp_path: Path) -> tuple[str, ...]:
    """In front of a Python program: its torch takes for ever to import."""
    (tmp_path / "slow" / "torch").mkdir(parents=True)
    (tmp_path / "slow" / "torch" / "__init__.py").write_text(IMPORTS)
    return ("env", f"PYTHONPATH={tmp_path / 'slow'}:{ROOT}")


def counts(block: SlurmJob, text: str, number: int) -> Callable[[], bool]:
    log = Path(block.spec.run_directory, "log.txt")
    return lambda: log.exists() and log.read_text().count(text) == number


def scancel_when(ready: Callable[[], bool], block: SlurmJob) -> float:
    """Seconds from scancel to the end, which was a person's doing."""
    moments = []

    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(wait_until, ready)
        moments.append(time.monotonic())
        await asyncio.to_thread(ask, "scancel", run.job_id)

    run, outcome = follow(block, meanwhile)
    seconds = time.monotonic() - moments[0]
    assert outcome.kind is Kind.STOPPED, Path(block.spec.run_directory, "log.txt").read_text()
    assert "JobState=CANCELLED" in ask("scontrol", "show", "job", run.job_id)
    return seconds


NODES = [1, pytest.param(2, marks=pytest.mark.full)]


@pytest.mark.parametrize("nodes", NODES)
def test_launcher_without_rank_ends(tmp_path: Path, slowly: tuple[str, ...], nodes: int) -> None:
    wanted = Resources(nodes=nodes, processes_per_node=2)
    launcher = (*slowly, *TORCHRUN)
    key = f"early-launcher-{nodes}"
    block = job(tmp_path, key, "pass", rank_launcher=launcher, resources=wanted)
    assert scancel_when(counts(block, "importing torch\n", nodes), block) < GONE_SECONDS


@pytest.mark.parametrize("nodes", NODES)
def test_new_ranks_end_at_once(tmp_path: Path, slowly: tuple[str, ...], nodes: int) -> None:
    options = training(tmp_path, str(tmp_path / "save"), 4)
    stage = (*slowly, sys.executable, "-m", "stages.pretrain", "--config", options)
    wanted = Resources(nodes=nodes, processes_per_node=2 // nodes)
    network = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    given = {"rank_launcher": TORCHRUN, "resources": wanted, "environment": network}
    block = job(tmp_path, f"early-ranks-{nodes}", "", command=stage, **given)
    assert scancel_when(counts(block, "importing torch\n", 2), block) < GONE_SECONDS
