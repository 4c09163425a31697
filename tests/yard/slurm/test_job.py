"""The Slurm block on a real cluster of two nodes: submitted, followed, cancelled, found again."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.backends.outcome import Kind, Outcome
from flows.backends.run_folder import SUBMITTED
from flows.backends.slurm.job import MOST_GRACE_SECONDS, SlurmJob, SlurmJobRun
from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.script import job_name
from flows.backends.spec import Resources, Shares
from tests.yard.jobs import (
    ALL_REDUCE,
    SAVES_SLOWLY,
    SAY,
    TORCHRUN,
    follow,
    killed,
    training,
    wait_until,
)
from tests.yard.slurm.cluster import TAKEN, Cluster, ask, job
from tests.yard.yard import ROOT
from trainyard.errors import ConfigError

pytestmark = [pytest.mark.yard, pytest.mark.timeout(180)]

TWO_NODES = Resources(nodes=2, processes_per_node=2)

KILL_WAIT_SECONDS = 30
"""Slurm's KillWait: how long scancel takes for a job that ignores it."""


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """For the runs of a test; seen by every node."""
    return tmp_path


def log_of(block: SlurmJob) -> Path:
    return Path(block.spec.run_directory, "log.txt")


def says(block: SlurmJob, text: str) -> Callable[[], bool]:
    return lambda: log_of(block).exists() and text in log_of(block).read_text()


def counts(block: SlurmJob, text: str, number: int) -> Callable[[], bool]:
    return lambda: log_of(block).exists() and log_of(block).read_text().count(text) == number


def test_a_second_cluster_on_one_machine_is_refused(folder: Path, cluster: Cluster) -> None:
    up = subprocess.run(
        [ROOT / "deploy/dev/slurm-up.sh", folder / "second"], capture_output=True, text=True
    )
    assert up.returncode == TAKEN
    assert f"another cluster runs on this machine: in {cluster.folder}" in up.stderr
    assert not (folder / "second").exists()

    shutil.copytree(cluster.folder, folder / "second", ignore=lambda *_: ["munge", "run", "spool"])
    down = [ROOT / "deploy/dev/slurm-down.sh", "--purge", folder / "second"]
    subprocess.run(down, check=True)
    assert not (folder / "second").exists()
    assert {"yard-switch", "yard-node1", "yard-node2"} <= set(ask("ip", "netns", "list").split())
    assert "node2" in Path("/etc/hosts").read_text()
    assert follow(job(folder, "alone-1", "print('here')"))[1].kind is Kind.DONE


# --- to their end -------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "kind"), [(0, Kind.DONE), (2, Kind.CONFIG), (70, Kind.DEFECT)])
def test_the_exit_status_of_a_command_comes_back(folder: Path, status: int, kind: Kind) -> None:
    block = job(folder, f"status-{status}", f"print('here'); raise SystemExit({status})")
    _, outcome = follow(block)
    assert (outcome.kind, outcome.exit_status) == (kind, status)
    assert "here" in log_of(block).read_text()


def test_ranks_on_two_nodes_find_each_other(folder: Path) -> None:
    block = job(
        folder,
        "ranks-1",
        ALL_REDUCE,
        rank_launcher=TORCHRUN,
        resources=Resources(nodes=2),
        environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
    )
    _, outcome = follow(block)
    assert outcome.kind is Kind.DONE, log_of(block).read_text()
    log = log_of(block).read_text()
    assert log.count(": 3.0") == 2
    assert log.count("on node1") == log.count("on node2") == 1


def test_only_a_failed_share_is_run_again(folder: Path) -> None:
    code = "import sys; sys.exit(3 * (sys.argv[2] == '1' and sys.argv[4] == '3'))"
    outcome = follow(job(folder, "shares-1", code, shares=Shares(count=3, at_once=2)))[1]
    assert (outcome.kind, outcome.failed_shares) == (Kind.INFRASTRUCTURE, (1,))
    again = Shares(count=3, only=outcome.failed_shares)
    block = job(folder, "shares-2", "import sys; print(sys.argv[1:])", shares=again)
    assert follow(block)[1].kind is Kind.DONE
    (log,) = Path(block.spec.run_directory).glob("log-*.txt")
    assert "['--rank', '1', '--world-size', '3']" in log.read_text()


def test_the_error_quotes_the_refusal_of_slurm(folder: Path) -> None:
    block = job(folder, "refused-1", "pass", options=SlurmOptions(partition="nowhere"))
    with pytest.raises(ConfigError, match=r"Invalid partition name.*Correct the Slurm options"):
        follow(block)


# --- ended by others ----------------------------------------------------------------------------


def test_a_job_out_of_time_is_reported_as_such(folder: Path) -> None:
    block = job(folder, "time-1", "import time; print('begun', flush=True); time.sleep(600)")

    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(wait_until, says(block, "begun"))
        await asyncio.to_thread(ask, "scontrol", "update", f"JobId={run.job_id}", "EndTime=now")

    outcome = follow(block, meanwhile)[1]
    assert (outcome.kind, outcome.exit_status) == (Kind.TIME_LIMIT, 3)


def test_scancel_by_a_person_is_not_retried(folder: Path) -> None:
    block = job(folder, "scancel-1", training())

    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(wait_until, says(block, "step 1"))
        await asyncio.to_thread(ask, "scancel", run.job_id)

    outcome = follow(block, meanwhile)[1]
    assert (outcome.kind, outcome.is_retryable) == (Kind.STOPPED, False)


@pytest.mark.full
def test_a_cancelled_job_on_two_nodes_is_not_done_although_srun_returns_0(folder: Path) -> None:
    stubborn = "import signal, time; signal.signal(15, print); say('on'); time.sleep(99)"
    block = job(folder, "scancel-2", SAY + stubborn, rank_launcher=TORCHRUN, resources=TWO_NODES)

    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(wait_until, counts(block, "on\n", 4))
        await asyncio.to_thread(ask, "scancel", run.job_id)

    assert follow(block, meanwhile)[1].kind is Kind.STOPPED


def test_a_silent_job_is_stopped(folder: Path) -> None:
    code = "import time; print('last words', flush=True); time.sleep(600)"
    _, outcome = follow(job(folder, "hang-1", code, hang_seconds=3.0))
    assert (outcome.kind, outcome.is_retryable) == (Kind.HANG, True)


@dataclass
class Cancelled:
    """A job that was cancelled."""

    run: SlurmJobRun
    outcome: Outcome
    seconds: float
    """From then to its end."""

    @property
    def left(self) -> str:
        """What of it still runs, waits, or ends."""
        job = f"--jobs={self.run.job_id}"
        return ask("squeue", "--noheader", job, "--states=R,PD,CG").strip()


def cancel(block: SlurmJob, ready: Callable[[], bool]) -> Cancelled:
    """Cancel the waiting when the job is ready."""

    async def whole() -> Cancelled:
        run = await block.trigger()
        waiting = asyncio.create_task(run.wait_for_completion())
        await asyncio.to_thread(wait_until, ready)
        signalled_at = time.monotonic()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        seconds = time.monotonic() - signalled_at
        return Cancelled(run, await run.fetch_result(), seconds)

    return asyncio.run(whole())


def test_cancelling_lets_training_save_and_leaves_no_job(folder: Path) -> None:
    block = job(folder, "cancel-1", training())
    cancelled = cancel(block, says(block, "step 2"))
    assert cancelled.outcome.kind is Kind.STOPPED
    assert "saved step" in log_of(block).read_text()
    assert cancelled.left == ""


@pytest.mark.full
def test_cancelling_lets_every_rank_of_two_nodes_save(folder: Path) -> None:
    block = job(folder, "cancel-2", training(), rank_launcher=TORCHRUN, resources=TWO_NODES)
    cancelled = cancel(block, counts(block, "step 2\n", 4))
    assert cancelled.outcome.kind is Kind.STOPPED
    assert len(re.findall(r"saved step \d", log_of(block).read_text())) == 4


def test_cancelling_shares_that_ignore_it_takes_their_grace_only(folder: Path) -> None:
    heedless = "import signal, time; signal.signal(15, print); print('on', flush=True)"
    block = job(
        folder, "cancel-3", f"{heedless}; time.sleep(99)", shares=Shares(count=2), grace_seconds=1.0
    )
    logs = Path(block.spec.run_directory)

    def all_run() -> bool:
        return sum("on\n" in path.read_text() for path in logs.glob("log-*.txt")) == 2

    cancelled = cancel(block, all_run)
    assert cancelled.outcome.kind is Kind.STOPPED
    assert cancelled.left == ""
    assert cancelled.seconds < KILL_WAIT_SECONDS


def test_a_job_whose_script_has_not_started_its_step_ends_at_once(folder: Path) -> None:
    setup = folder / "modules.sh"
    setup.write_text("echo loading\nsleep 60\n")
    options = SlurmOptions(setup_file=str(setup))
    block = job(folder, "setup-1", training(), options=options)
    cancelled = cancel(block, says(block, "loading"))
    assert cancelled.outcome.kind is Kind.STOPPED
    assert "step " not in log_of(block).read_text()
    assert cancelled.left == ""
    assert cancelled.seconds < MOST_GRACE_SECONDS


def test_a_job_that_waits_is_cancelled_in_the_queue(folder: Path) -> None:
    block = job(folder, "queue-1", "pass", options=SlurmOptions(extra=("--hold",)))
    cancelled = cancel(block, lambda: Path(block.spec.run_directory, SUBMITTED).exists())
    assert cancelled.outcome.kind is Kind.STOPPED
    assert "CANCELLED" in ask("scontrol", "show", "job", cancelled.run.job_id)


# --- found again --------------------------------------------------------------------------------

SUBMITTER = """
import asyncio, json, sys
from flows.backends.spec import LaunchSpec
from flows.backends.slurm.job import SlurmJob

async def main():
    given = json.loads(sys.argv[1])
    spec = LaunchSpec(**given | {"command": tuple(given["command"])})
    await (await SlurmJob(spec=spec, poll_seconds=1.0).trigger()).wait_for_completion()

asyncio.run(main())
"""


def submit_and_be_killed(
    block: SlurmJob, when: Callable[[], bool], cancelling: Callable[[], bool] | None = None
) -> None:
    """A program that follows a job is killed: when something holds, or, if it is cancelled then,
    when it is `cancelling`."""
    spec = block.spec
    names = ("name", "command", "run_directory", "key", "working_directory")
    given = json.dumps({name: getattr(spec, name) for name in names})
    command = [sys.executable, "-c", SUBMITTER, given]
    program = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
    with killed(program) as flow:
        wait_until(when)
        if cancelling is not None:
            flow.send_signal(signal.SIGINT)
            wait_until(cancelling)


@pytest.mark.parametrize(
    "is_noted",
    [
        pytest.param(False, id="killed before it was noted"),
        pytest.param(True, id="noted", marks=pytest.mark.full),
    ],
)
def test_a_killed_flow_finds_its_job_again(folder: Path, is_noted: bool) -> None:
    key = f"again-{int(is_noted)}"
    block = job(folder, key, training(steps=16))
    submit_and_be_killed(block, says(block, "step 3"))
    if not is_noted:
        Path(block.spec.run_directory, SUBMITTED).unlink()
    run, outcome = follow(block)
    assert outcome.kind is Kind.DONE
    jobs = ask("squeue", "--noheader", "--states=all", f"--name={job_name(block.spec)}", "-o%i")
    assert jobs.split() == [run.job_id]
    steps = [line for line in log_of(block).read_text().splitlines() if line.startswith("step ")]
    assert steps == [f"step {number}" for number in range(16)]


def test_a_finished_job_is_not_submitted_again(folder: Path) -> None:
    block = job(folder, "finished-1", "print('once')")
    first, _ = follow(block)
    second, outcome = follow(block)
    assert (second.job_id, outcome.kind) == (first.job_id, Kind.DONE)
    assert log_of(block).read_text().count("once") == 1


@pytest.mark.full
def test_a_cancelled_job_may_save_after_its_flow_is_killed(folder: Path) -> None:
    block = job(folder, "saving-1", SAVES_SLOWLY)
    submit_and_be_killed(block, says(block, "begun"), cancelling=says(block, "saving"))
    run, outcome = follow(block)
    assert outcome.kind is Kind.STOPPED
    lines = log_of(block).read_text().split("\n")
    assert "all of it is saved" in lines
    assert "cut short" not in lines
    assert ask("squeue", "--noheader", f"--jobs={run.job_id}", "--states=R,PD,CG").strip() == ""


# --- a power failure ----------------------------------------------------------------------------


def node2_is_down() -> bool:
    return "down" in ask("sinfo", "--noheader", "--nodes=node2", "--format=%T")


@pytest.mark.full
def test_a_lost_node_costs_a_restart_and_no_second_job(cluster: Cluster, folder: Path) -> None:
    code = f"import os; print('run', os.environ.get('SLURM_RESTART_COUNT', '0'))\n{training(60)}"
    block = job(folder, "power-1", code, options=SlurmOptions(nodelist="node2"))

    async def meanwhile(run: SlurmJobRun) -> None:
        await asyncio.to_thread(wait_until, says(block, "step 3"))
        await asyncio.to_thread(cluster.power_off, "node2")
        await asyncio.to_thread(wait_until, node2_is_down)
        await asyncio.to_thread(cluster.up, False)

    run, outcome = follow(block, meanwhile)
    assert outcome.kind is Kind.DONE, log_of(block).read_text()
    log = log_of(block).read_text()
    assert "run 0" in log
    assert "run 1" in log
    exit_file = json.loads(Path(block.spec.run_directory, "exit.json").read_text())
    assert (exit_file["job_id"], exit_file["restarts"]) == (run.job_id, 1)
