"""The Slurm block when Slurm is away, forgets a job or was set up again."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from flows.backends.outcome import Kind
from flows.backends.run_folder import (
    HEARTBEAT,
    LOG,
    STOP_RECORD,
    SUBMITTED,
    StopRecord,
    read_stop_record,
    write_stop_record,
)
from flows.backends.slurm import job as slurm
from flows.backends.slurm.client import CommandResult
from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.script import SCRIPT
from tests.flows.backends.slurm.fake_slurm import (
    AWAY,
    NO_LOG,
    UNKNOWN,
    FakeSlurm,
    FakeSlurmJob,
    block,
    follow,
    state,
    write_exit,
)
from trainyard.errors import ConfigError, InfrastructureError


def test_the_exit_file_shows_the_end_of_a_job_that_slurm_has_forgotten(tmp_path: Path) -> None:
    write_exit(tmp_path, 2)
    outcome = follow(block(tmp_path, FakeSlurm([UNKNOWN], squeue="17")))
    assert (outcome.kind, outcome.exit_status) == (Kind.CONFIG, 2)


def test_a_job_without_a_trace_is_unknown_and_not_submitted_again(tmp_path: Path) -> None:
    played = FakeSlurm([UNKNOWN])
    first = follow(block(tmp_path, played))
    assert (first.kind, first.is_retryable) == (Kind.UNKNOWN, False)
    assert "forgotten" in first.message
    follow(block(tmp_path, played))
    assert played.asked.count("sbatch") == 1


def test_another_clusters_job_of_the_same_number_is_not_ours(tmp_path: Path) -> None:
    played = FakeSlurm([state("COMPLETED", JobName="somebody-elses")])
    assert follow(block(tmp_path, played)).kind is Kind.UNKNOWN


def test_an_unavailable_controller_ends_the_waiting_and_not_the_job(tmp_path: Path) -> None:
    played = FakeSlurm([state("RUNNING"), AWAY])
    with pytest.raises(InfrastructureError, match="Unable to contact"):
        follow(block(tmp_path, played))
    assert "scancel" not in played.asked
    played.scontrol = [state("COMPLETED", ExitCode="0:0")]
    assert follow(block(tmp_path, played)).kind is Kind.DONE
    assert played.asked.count("sbatch") == 1


def test_wait_for_a_stuck_job_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "KILL_SECONDS", 0.01)
    silent = block(tmp_path, FakeSlurm([state("RUNNING")]))
    silent.hang_seconds = 0.01
    with pytest.raises(InfrastructureError, match="still exists 0 s after scancel"):
        follow(silent)


def test_a_job_that_slurm_holds_forever_ends_as_a_node_failure(tmp_path: Path) -> None:
    held = state("PENDING", Reason="launch_failed_requeued_held")
    played = FakeSlurm([held], heeds_scancel=True)
    assert follow(block(tmp_path, played)).kind is Kind.NODE_FAILURE
    assert "scancel" in played.asked


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("srun: error: node1: task 0: Out Of Memory\n", Kind.OUT_OF_MEMORY),
        ("srun: error: node[1-2]: tasks 0-1: Out Of Memory\n", Kind.OUT_OF_MEMORY),
        ("srun: error: node1: task 0: Exited with exit code 1\n", Kind.DATA),
    ],
)
def test_the_log_of_srun_shows_a_step_that_a_cgroup_killed(
    tmp_path: Path, log: str, kind: Kind
) -> None:
    """Slurm says FAILED, and srun's status is that of a fault in the data."""
    write_exit(tmp_path, 1)
    (tmp_path / LOG).write_text(f"line\n{log}line\n")
    played = FakeSlurm([state("FAILED", Reason="NonZeroExitCode", ExitCode="1:0")])
    assert follow(block(tmp_path, played)).kind is kind


def test_a_job_that_can_never_start_is_stopped_and_a_held_one_is_not(tmp_path: Path) -> None:
    waits = [state("PENDING", Reason="PartitionTimeLimit")]
    at_once = SlurmOptions(broken_seconds=0)
    never = block(tmp_path / "never", FakeSlurm(waits, heeds_scancel=True))
    never.options = at_once
    outcome = follow(never)
    assert (outcome.kind, outcome.is_retryable) == (Kind.CONFIG, False)
    assert "job 17 could not have started: the partition does not allow so long" in outcome.message

    patient = block(
        tmp_path / "patient", FakeSlurm([*waits * 3, state("COMPLETED")], heeds_scancel=True)
    )
    assert follow(patient).kind is Kind.DONE
    is_held = [state("PENDING", Reason="JobHeldUser")]
    held = block(
        tmp_path / "held", FakeSlurm([*is_held * 3, state("COMPLETED")], heeds_scancel=True)
    )
    held.options = at_once
    assert follow(held).kind is Kind.DONE


def test_the_script_and_the_job_are_recorded(tmp_path: Path) -> None:
    follow(block(tmp_path, FakeSlurm([state("COMPLETED")])))
    assert "#SBATCH --job-name=merge-k-1" in (tmp_path / SCRIPT).read_text()
    assert json.loads((tmp_path / SUBMITTED).read_text()) == {"name": "merge-k-1", "job_id": "17"}


def test_a_run_folder_is_for_one_submission(tmp_path: Path) -> None:
    follow(block(tmp_path, FakeSlurm([state("COMPLETED")])))
    with pytest.raises(ConfigError, match="belongs to job merge-k-1, not to merge-k-2"):
        follow(block(tmp_path, FakeSlurm([state("COMPLETED")]), key="k-2"))


def test_the_result_of_a_running_job_is_refused_with_the_next_step(tmp_path: Path) -> None:
    async def ask() -> None:
        run = await block(tmp_path, FakeSlurm([state("RUNNING")])).trigger()
        with pytest.raises(ValueError, match="call wait_for_completion"):
            await run.fetch_result()

    asyncio.run(ask())


@dataclass
class Slow(FakeSlurm):
    """One program, from some moment on, answers when `answer` is set; `asked_slow` is set first."""

    program: str = "sbatch"
    is_slow: bool = True
    asked_slow: Event = field(default_factory=Event)
    answer: Event = field(default_factory=Event)

    def __call__(self, command: Sequence[str]) -> CommandResult:
        if command[0] == self.program and self.is_slow:
            self.asked_slow.set()
            assert self.answer.wait(10)
        return super().__call__(command)


def cancelled_while_it_submits(block: FakeSlurmJob, played: Slow, times: int = 1) -> None:
    async def whole() -> None:
        triggering = asyncio.create_task(block.trigger())
        await asyncio.to_thread(played.asked_slow.wait, 10)
        for _ in range(times):
            triggering.cancel()
            await asyncio.sleep(0)
        played.answer.set()
        with pytest.raises(asyncio.CancelledError):
            await triggering

    asyncio.run(whole())


@pytest.mark.parametrize("times", [1, 3])
def test_being_cancelled_while_it_submits_leaves_no_job_behind(tmp_path: Path, times: int) -> None:
    played = Slow([state("PENDING")], heeds_scancel=True)
    cancelled_while_it_submits(block(tmp_path, played), played, times)
    assert played.asked.count("sbatch") == played.asked.count("scancel") == 1
    assert played.asked.index("sbatch") < played.asked.index("scancel")


def test_a_cancellation_is_recorded_before_slurm_is_asked_anything(tmp_path: Path) -> None:
    """Prefect's worker kills a flow that takes too long over it."""
    pending = [state("PENDING", Reason="JobHeldUser")]
    played = Slow(pending, heeds_scancel=True, program="scontrol", is_slow=False)

    async def whole() -> None:
        run = await block(tmp_path, played).trigger()
        waiting = asyncio.create_task(run.wait_for_completion())
        played.is_slow = True
        await asyncio.to_thread(played.asked_slow.wait, 10)
        waiting.cancel()
        while not (tmp_path / STOP_RECORD).exists():
            await asyncio.sleep(0)
        assert "scancel" not in played.asked
        played.answer.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await run.fetch_result()).kind is Kind.STOPPED

    asyncio.run(asyncio.wait_for(whole(), 20))


def test_reads_at_the_same_time_pass_each_line_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancelled read continues in its thread."""
    run = asyncio.run(block(tmp_path, FakeSlurm([state("RUNNING")])).trigger())
    replace = Path.replace

    def slowly(path: Path, target: Path) -> Path:
        time.sleep(0.01)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", slowly)
    written = [f"line {number}" for number in range(200)]
    (tmp_path / LOG).write_text("".join(line + "\n" for line in written))
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(run._read_logs) for _ in range(8)]
        assert sum(look.result() for look in looks) == 1
    assert [text for text in caplog.messages if text.startswith("line ")] == written


def test_being_cancelled_while_slurm_refuses_is_being_cancelled(tmp_path: Path) -> None:
    class Refuses(Slow):
        def __call__(self, command: Sequence[str]) -> CommandResult:
            answer = super().__call__(command)
            return CommandResult(1, "", "Invalid partition") if command[0] == "sbatch" else answer

    played = Refuses([UNKNOWN])
    cancelled_while_it_submits(block(tmp_path, played), played)
    assert "scancel" not in played.asked


# --- a log that could not be opened ---------------------------------------------------------------


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_log_that_cannot_be_opened_is_a_node_failure(tmp_path: Path, restarts: str) -> None:
    if restarts != "0":
        (tmp_path / LOG).write_text("of the run before\n")
        write_exit(tmp_path, 143)
    outcome = follow(block(tmp_path, FakeSlurm([state("FAILED", **NO_LOG, Restarts=restarts)])))
    assert (outcome.kind, outcome.is_retryable) == (Kind.NODE_FAILURE, True)
    assert f"could not open the job's log, {tmp_path / LOG}: does n7 see" in outcome.message


def test_a_script_that_began_and_died_of_that_signal_is_no_node_failure(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("step 1\n")
    outcome = follow(block(tmp_path, FakeSlurm([state("FAILED", **NO_LOG)])))
    assert (outcome.kind, outcome.is_retryable) == (Kind.DEFECT, False)


# --- a program that was killed while it ended the job ---------------------------------------------


@pytest.mark.parametrize(
    ("kind", "was_signalled", "signals"),
    [
        pytest.param(Kind.STOPPED, False, 1, id="before it told the job"),
        pytest.param(Kind.STOPPED, True, 0, id="while the job saved"),
        pytest.param(Kind.HANG, False, 0, id="of a job that hung"),
    ],
)
def test_ending_is_resumed(tmp_path: Path, kind: Kind, was_signalled: bool, signals: int) -> None:
    played = FakeSlurm([state("RUNNING")], heeds_scancel=True)
    killed = block(tmp_path, played, grace_seconds=0.01)
    asyncio.run(killed.trigger())
    write_stop_record(tmp_path, StopRecord(kind=kind, was_signalled=was_signalled))
    assert follow(killed).kind is kind
    assert played.asked.count("sbatch") == 1
    assert len(played.signalled) == signals
    assert "CANCELLED" in played.scontrol[0].out
    assert read_stop_record(tmp_path) == StopRecord(kind=kind, was_signalled=kind is Kind.STOPPED)


def test_a_job_that_succeeds_before_its_cancellation_is_done(tmp_path: Path) -> None:
    write_stop_record(tmp_path, StopRecord(kind=Kind.STOPPED, was_signalled=True))
    played = FakeSlurm([state("COMPLETED", ExitCode="0:0")])
    assert follow(block(tmp_path, played)).kind is Kind.DONE
    assert "scancel" not in played.asked


def test_a_folder_that_takes_no_record_keeps_no_job_from_being_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = block(tmp_path, played := FakeSlurm([state("RUNNING")], heeds_scancel=True))
    silent.hang_seconds = 0.01
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if target.name == STOP_RECORD:
            raise OSError(errno.EROFS, "Read-only file system")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    assert follow(silent).kind is Kind.HANG
    assert "scancel" in played.asked


# --- a file system that is away -------------------------------------------------------------------


@pytest.mark.parametrize("name", [LOG, HEARTBEAT, SUBMITTED, STOP_RECORD])
def test_an_unreadable_run_folder_ends_the_wait_but_not_the_job(tmp_path: Path, name: str) -> None:
    played = FakeSlurm([state("RUNNING")], squeue="17")
    asyncio.run(block(tmp_path, played).trigger())
    there = (tmp_path / name).exists() and (tmp_path / name).rename(tmp_path / "kept")
    (tmp_path / name).symlink_to(name)  # a loop: neither a file nor none
    with pytest.raises(InfrastructureError, match=f"run folder {tmp_path} cannot be used"):
        follow(block(tmp_path, played))
    assert "scancel" not in played.asked
    (tmp_path / name).unlink()
    if there:
        there.rename(tmp_path / name)
    played.scontrol = [state("COMPLETED", ExitCode="0:0")]
    assert follow(block(tmp_path, played)).kind is Kind.DONE
    assert "sbatch" not in played.asked  # found, and followed again
