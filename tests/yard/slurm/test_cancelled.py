"""A training on Slurm that is cancelled in Prefect ends before the worker kills its flow."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.yard.faults.faults import training
from tests.yard.operator.deployed import WholeServer, comes, register, working
from tests.yard.slurm.cluster import Cluster, ask, profile_on_two_nodes
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

STOP_SECONDS = 30
"""From the button to the end of all: so long a worker waits before it kills a flow."""

HEEDLESS = """#!/bin/bash
# Signals do not reach it: as where a rank hangs in the kernel, or in a collective.
[[ " $* " != *" stages.pretrain "* ]] || exec {python} -c '
import signal, time
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("iteration none", flush=True)
time.sleep(600)
'
exec {python} "$@"
"""


def jobs_left() -> str:
    """Jobs that are queued, running or ending."""
    return ask("squeue", "--noheader", "--format=%i %T")


@pytest.mark.full
@pytest.mark.parametrize("heeds", [True, False], ids=["saves", "pays no heed"])
def test_cancelled_run(cluster: Cluster, tmp_path: Path, server: WholeServer, heeds: bool) -> None:
    python = sys.executable
    if not heeds:
        path = tmp_path / "python"
        path.write_text(HEEDLESS.format(python=sys.executable))
        path.chmod(0o755)
        python = str(path)
    profile = tmp_path / "site.toml"
    offered = 'deployments = ["run-stage"]'
    profile.write_text(profile_on_two_nodes(tmp_path, offered, python=python))
    environment = {"TRAINYARD_CACHE": str(tmp_path / "cache"), **server.environment}
    yard = Yard(tmp_path, {**environment, "SLURM_CONF": os.environ["SLURM_CONF"]})
    register(yard, str(profile))
    save = tmp_path / "save"
    document = training(tmp_path, str(save), 100_000, save_interval=1000)

    def has_begun() -> bool:
        logs = tmp_path.glob("runs/**/log.txt")
        return any("iteration " in path.read_text() for path in logs)

    with working(yard, "site") as worker:
        run = server.begin("run-stage/site", stage="pretrain", config=document)
        assert comes(120, has_begun), worker.output
        assert jobs_left()
        server.cancel(run)
        pressed = time.monotonic()
        is_over = comes(STOP_SECONDS, lambda: not jobs_left())
        assert is_over, worker.output
        gone = time.monotonic() - pressed
        left = STOP_SECONDS - gone
        assert comes(left, lambda: server.state(run) == "CANCELLED"), worker.output
        print(f"gone after {gone:.1f} s, cancelled after {time.monotonic() - pressed:.1f} s")
        output = worker.output
    (folder,) = tmp_path.glob("runs/*/pretrain/*")
    assert '"kind": "stopped"' in (folder / "settled.json").read_text()
    assert "did not exit" not in output  # nobody had to kill it
    (log,) = folder.glob("log.txt")
    assert ("saved step" in log.read_text()) is heeds
