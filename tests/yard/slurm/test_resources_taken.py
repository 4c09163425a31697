"""Jobs on Slurm that are preempted, killed for their memory or never started."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm.job import SlurmJob, SlurmJobRun
from flows.backends.slurm.options import SlurmOptions
from flows.backends.spec import Resources
from tests.yard.jobs import SAY, TORCHRUN, follow, training, wait_until
from tests.yard.slurm.cluster import Cluster, ask, job

pytestmark = [pytest.mark.yard, pytest.mark.timeout(180)]

ON_NODE2 = SlurmOptions(nodelist="node2", exclusive=True)


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """For the runs of a test; what others run there is gone after it."""
    yield tmp_path
    ask("scancel", "--name=others")


def log_of(block: SlurmJob) -> Path:
    return Path(block.spec.run_directory, "log.txt")


def says(block: SlurmJob, text: str, number: int = 1) -> Callable[[], bool]:
    return lambda: log_of(block).exists() and log_of(block).read_text().count(text) >= number


def push_out(seconds: int = 3) -> None:
    """Others come, who go before us, and want all of node2."""
    options = ("--job-name=others", "--partition=urgent", "--nodelist=node2", "--exclusive")
    ask("sbatch", *options, "--output=/dev/null", f"--wrap=sleep {seconds}")


def pushed_out_when(ready: Callable[[], bool]) -> Callable[[SlurmJobRun], object]:
    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(wait_until, ready)
        await asyncio.to_thread(push_out)

    return meanwhile


# --- preempted ------------------------------------------------------------------------------------


def test_a_job_that_saves_and_leaves_within_its_grace_was_preempted(folder: Path) -> None:
    """Slurm calls it FAILED and does not requeue it; its report says that somebody stopped it."""
    spot = replace(ON_NODE2, partition="spot")
    block = job(folder, "spot-1", training(), options=spot)
    outcome = follow(block, pushed_out_when(says(block, "step 2")))[1]
    assert "saved step" in log_of(block).read_text()
    assert (outcome.kind, outcome.is_retryable) == (Kind.PREEMPTED, True)
    assert outcome.step is not None
    assert "other jobs took its nodes" in outcome.message


@pytest.mark.full
def test_a_job_that_does_not_leave_in_its_grace_was_preempted(folder: Path) -> None:
    """Slurm cancels it 20 s after the signal."""
    stubborn = (
        "import signal, time; signal.signal(15, print); print('on', flush=True); time.sleep(999)"
    )
    block = job(folder, "spot-2", stubborn, options=replace(ON_NODE2, partition="spot"))
    outcome = follow(block, pushed_out_when(says(block, "on\n")))[1]
    assert (outcome.kind, outcome.is_retryable) == (Kind.PREEMPTED, True)


SAVES_LONG = f"""{SAY}
import signal, time
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as stages do: who ignores it has not begun
say("on")
while not signals:
    time.sleep(0.1)
for tenth in range(330):
    if tenth == 320:  # torchrun tells those that are left when the first has ended
        say(f"almost saved, signals {{len(signals)}}")
    time.sleep(0.1)
say("saved")
raise SystemExit(143)
"""
"""For longer than the 30 s after which torchrun kills ranks."""


@pytest.fixture
def long_grace(folder: Path) -> Iterator[str]:
    """A partition whose jobs have a minute to leave in."""
    ask("scontrol", "update", "PartitionName=spot", "GraceTime=60")
    yield "spot"
    ask("scontrol", "update", "PartitionName=spot", "GraceTime=20")


@pytest.mark.full
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_have_the_grace_of_the_partition(folder: Path, long_grace: str, nodes: int) -> None:
    options = SlurmOptions(partition=long_grace, nodelist="node2" if nodes == 1 else None)
    wanted = Resources(nodes=nodes, processes_per_node=2)
    key = f"grace-{nodes}"
    block = job(folder, key, SAVES_LONG, options=options, resources=wanted, rank_launcher=TORCHRUN)
    outcome = follow(block, pushed_out_when(says(block, "on\n", 2 * nodes)))[1]
    log = log_of(block).read_text()
    assert log.count("almost saved, signals 1\n") == 2 * nodes
    assert len(re.findall(r"^(\d: )?saved$", log, re.MULTILINE)) == 2 * nodes
    assert outcome.kind is Kind.PREEMPTED


def test_a_requeued_job_resumes_under_its_id(folder: Path) -> None:
    code = f"import os; print('run', os.environ.get('SLURM_RESTART_COUNT', '0'))\n{training(12)}"
    block = job(folder, "debug-1", code, options=ON_NODE2)
    run, outcome = follow(block, pushed_out_when(says(block, "step 2")))
    log = log_of(block).read_text()
    assert outcome.kind is Kind.DONE, log
    assert "run 0" in log
    assert "run 1" in log
    exit_file = json.loads(Path(block.spec.run_directory, "exit.json").read_text())
    assert (exit_file["job_id"], exit_file["restarts"]) == (run.job_id, 1)


# --- out of memory --------------------------------------------------------------------------------

GREEDY = """
held = []
for mebibytes in range(0, 1000, 10):
    held.append(b"1" * 10 * 2**20)
    print("holds", mebibytes, flush=True)
"""


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["one process", "ranks"])
def test_cgroup_end_is_memory(cluster: Cluster, folder: Path, launcher: tuple[str, ...]) -> None:
    if not cluster.bounds_memory:
        pytest.skip("no memory controller of cgroups v1 that can be written to")
    limit = 600 * 2**20  # torchrun alone takes a third of it
    wanted = Resources(memory_bytes_per_node=limit)
    key = f"memory-{len(launcher)}"
    block = job(folder, key, GREEDY, resources=wanted, rank_launcher=launcher)
    outcome = follow(block)[1]
    log = log_of(block).read_text()
    assert "holds 100\n" in log
    assert "holds 700\n" not in log
    assert (outcome.kind, outcome.is_retryable) == (Kind.OUT_OF_MEMORY, True), log
    assert "more memory than it asked for" in outcome.message


# --- never started --------------------------------------------------------------------------------


def test_a_job_that_can_never_start_is_stopped(folder: Path) -> None:
    """A partition is made smaller while the job waits: sbatch refuses no such job."""
    options = SlurmOptions(broken_seconds=2)
    ask("scontrol", "create", "PartitionName=small", "Nodes=ALL", "MaxNodes=1")
    try:
        block = job(
            folder,
            "never-1",
            "pass",
            options=replace(options, partition="small"),
            resources=Resources(nodes=2),
        )
        run, outcome = follow(block)
    finally:
        ask("scontrol", "delete", "PartitionName=small")
    assert (outcome.kind, outcome.exit_status) == (Kind.CONFIG, 2)
    assert "does not allow this many nodes; correct the Slurm options" in outcome.message
    assert "CANCELLED" in ask("scontrol", "show", "job", run.job_id)
