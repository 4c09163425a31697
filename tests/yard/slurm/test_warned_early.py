"""SIGUSR1 that comes while a stage starts ends it, instead of being lost."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm.job import SlurmJobRun
from flows.backends.spec import Resources
from tests.yard.faults.faults import training
from tests.yard.jobs import TORCHRUN, follow, wait_until
from tests.yard.slurm.cluster import ask, job
from tests.yard.yard import ROOT

pytestmark = [pytest.mark.yard, pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]

STARTS = """
import os, sys, time
if "stages.pretrain" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    os.write(1, b"python starts\\n")
    time.sleep(600)
"""
"""A Python on a slow disk: nothing of the stage runs yet."""

IMPORTS = """
import os, time
os.write(1, b"importing torch\\n")
time.sleep(600)
"""
"""A torch on a slow disk: the stage runs, without a handler of its own in ranks that follow."""

SECONDS = 28
"""Two nodes leave each other ten seconds, and torchrun takes as many to see that one is gone."""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("sitecustomize.py", STARTS, "python starts\n"),
        ("torch/__init__.py", IMPORTS, "importing torch\n"),
    ],
    ids=["python starts", "torch is imported"],
)
def test_sigusr1_while_a_stage_starts_is_not_lost(
    tmp_path: Path, ranks: int, module: str, text: str, said: str
) -> None:
    slow = tmp_path / "slow" / module
    slow.parent.mkdir(parents=True)
    slow.write_text(text)
    options = training(tmp_path, str(tmp_path / "save"), 4)
    command = ("env", f"PYTHONPATH={tmp_path / 'slow'}:{ROOT}", sys.executable)
    block = job(
        tmp_path,
        f"warned-{slow.stem.strip('_')}-{ranks}",
        "",
        command=(*command, "-m", "stages.pretrain", "--config", options),
        rank_launcher=TORCHRUN,
        resources=Resources(processes_per_node=ranks),
        environment={"OMP_NUM_THREADS": "1"},
    )
    log = Path(block.spec.run_directory, "log.txt")
    moments = []

    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(
            wait_until, lambda: log.exists() and log.read_text().count(said) == ranks
        )
        moments.append(time.monotonic())
        await asyncio.to_thread(ask, "scancel", "--signal=USR1", run.job_id)

    outcome = follow(block, meanwhile)[1]
    assert (outcome.kind, outcome.is_retryable) == (Kind.TIME_LIMIT, True), log.read_text()
    assert time.monotonic() - moments[0] < SECONDS
