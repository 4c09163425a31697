"""Slurm's programs with recorded answers: commands, retries and errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flows.backends.errors import NoRoomError
from flows.backends.slurm.client import (
    FORBIDDEN,
    MISSING,
    OVERDUE,
    CommandResult,
    SlurmClient,
    client_environment,
    run_here,
    run_program,
)
from flows.doctor.backends import run
from trainyard.errors import ConfigError, InfrastructureError

AWAY = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect)"
SOCKET = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
NO_ACCOUNTING = CommandResult(1, "", "Slurm accounting storage is disabled\n")
UNKNOWN = CommandResult(1, "", "slurm_load_jobs error: Invalid job id specified\n")


@dataclass
class Tape:
    """Answers in the order in which they are given, by program."""

    answers: dict[str, list[CommandResult]]
    asked: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> CommandResult:
        self.asked.append(" ".join(command))
        of_program = self.answers[command[0]]
        return of_program.pop(0) if len(of_program) > 1 else of_program[0]

    def client(self, patience_seconds: float = 20.0) -> SlurmClient:
        return SlurmClient(self, patience_seconds, self.slept.append)

    def count(self, program: str) -> int:
        return sum(asked.split()[0] == program for asked in self.asked)


def printed(out: str) -> CommandResult:
    return CommandResult(0, out, "")


SCRIPT = Path("/yard/run/job.sbatch")


def test_a_script_is_submitted_once() -> None:
    tape = Tape({"sbatch": [printed("17\n")]})
    assert tape.client().submit(SCRIPT, "merge-a-1") == "17"
    assert tape.asked == ["sbatch --parsable /yard/run/job.sbatch"]


def test_a_submission_whose_answer_was_lost_is_found_and_not_repeated() -> None:
    tape = Tape({"sbatch": [CommandResult(1, "", SOCKET)], "squeue": [printed("17\n")]})
    assert tape.client().submit(SCRIPT, "merge-a-1") == "17"
    assert tape.count("sbatch") == 1
    assert "--name=merge-a-1" in tape.asked[1]


def test_a_submission_that_did_not_get_through_is_repeated() -> None:
    answers = {
        "sbatch": [CommandResult(1, "", AWAY), CommandResult(1, "", AWAY), printed("18\n")],
        "squeue": [printed("")],
        "sacct": [NO_ACCOUNTING],
    }
    tape = Tape(answers)
    assert tape.client().submit(SCRIPT, "merge-a-1") == "18"
    assert tape.slept == pytest.approx([0.5, 1.0], rel=0.2)
    assert tape.count("sacct") == 1, "a cluster without accounting is asked for it once"


def test_an_unavailable_controller_is_an_infrastructure_error() -> None:
    tape = Tape(
        {"sbatch": [CommandResult(1, "", AWAY)], "squeue": [printed("")], "sacct": [NO_ACCOUNTING]}
    )
    with pytest.raises(InfrastructureError, match="Unable to contact slurm controller"):
        tape.client().submit(SCRIPT, "merge-a-1")
    assert sum(tape.slept) >= 20


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
        "sbatch: error: invalid partition specified: nowhere",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified",
    ],
)
def test_a_refused_submission_is_a_config_error(words: str) -> None:
    tape = Tape({"sbatch": [CommandResult(1, "", words)]})
    with pytest.raises(ConfigError, match=r"was refused: .*Correct the Slurm options"):
        tape.client().submit(SCRIPT, "merge-a-1")
    assert tape.count("sbatch") == 1


POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
    "limit, user's size and/or time limits)"
)
"""Slurm's line for every limit, behind the one that names it."""


@pytest.mark.parametrize(
    "reason",
    ["QOSMaxSubmitJobPerUserLimit", "AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit"],
)
def test_a_full_queue_is_not_a_config_error(reason: str) -> None:
    words = f"sbatch: error: {reason}\n{POLICY}\n"
    with pytest.raises(NoRoomError, match=reason):
        Tape({"sbatch": [CommandResult(1, "", words)]}).client().submit(SCRIPT, "merge-a-1")


@pytest.mark.parametrize(
    "reason", ["QOSMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "QOSGrpCpuLimit", ""]
)
def test_a_permanent_limit_is_named_as_a_wrong_option(reason: str) -> None:
    words = f"sbatch: error: {reason}\n{POLICY}\n" if reason else POLICY
    with pytest.raises(ConfigError, match=rf"{reason}.*Job violates.*Correct the Slurm options"):
        Tape({"sbatch": [CommandResult(1, "", words)]}).client().submit(SCRIPT, "merge-a-1")


def test_the_newest_job_of_a_name_is_found_also_in_accounting() -> None:
    tape = Tape({"squeue": [printed("9\n10\n")]})
    assert tape.client().find("merge-a-1") == "10"
    tape = Tape({"squeue": [printed("")], "sacct": [printed("9_0\n9_1\n")]})
    assert tape.client().find("merge-a-1") == "9"
    assert (
        Tape({"squeue": [printed("")], "sacct": [printed("")]}).client().find("merge-a-1") is None
    )


def test_a_job_that_the_controller_forgot_is_looked_up_in_accounting() -> None:
    row = "17|COMPLETED|0:0|node1|merge-a-1\n"
    tape = Tape({"scontrol": [UNKNOWN], "sacct": [printed(row)]})
    (record,) = tape.client().records("17")
    assert (record.state, record.name) == ("COMPLETED", "merge-a-1")


def test_ends_of_shares_that_the_controller_forgot_are_looked_up_in_accounting() -> None:
    held = printed("JobId=19 ArrayJobId=17 ArrayTaskId=2 JobState=RUNNING")
    rows = "17_0|FAILED|1:0|node1|a\n17_1|COMPLETED|0:0|node1|a\n17_2|RUNNING|0:0|node1|a\n"
    tape = Tape({"scontrol": [held], "sacct": [printed(rows)]})
    found = [(r.shares, r.state) for r in tape.client().records("17", {0, 2})]
    assert found == [((2,), "RUNNING"), ((0,), "FAILED")]
    assert Tape({"scontrol": [held]}).client().records("17", {2})[0].state == "RUNNING"


def test_nothing_known_is_no_error_and_not_the_end() -> None:
    assert Tape({"scontrol": [UNKNOWN], "sacct": [printed("")]}).client().records("17") == []
    assert Tape({"scontrol": [UNKNOWN], "sacct": [NO_ACCOUNTING]}).client().records("17") == []


def test_requests_are_repeated_while_the_controller_is_unavailable() -> None:
    tape = Tape({"scontrol": [CommandResult(1, "", AWAY), printed("JobId=17 JobState=RUNNING")]})
    assert tape.client().records("17")[0].state == "RUNNING"
    with pytest.raises(InfrastructureError, match="scontrol show job"):
        Tape({"scontrol": [CommandResult(1, "", AWAY)]}).client().records("17")


def test_programs_that_hang_use_up_the_patience_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def hangs(command: Sequence[str]) -> CommandResult:
        nonlocal now
        now += 60
        return CommandResult(1, "", SOCKET)

    monkeypatch.setattr("time.monotonic", lambda: now)
    with pytest.raises(InfrastructureError, match="Socket timed out"):
        SlurmClient(hangs, 120.0, lambda seconds: None).records("17")
    assert now == 120


def test_a_machine_without_slurm_gives_an_error() -> None:
    with pytest.raises(ConfigError, match="no-such-sbatch is not installed here"):
        run_here(("no-such-sbatch",))


# --- programs are run -----------------------------------------------------------------------------


def test_a_program_is_run_to_its_end() -> None:
    program = "import sys; print('x'); print('bad', file=sys.stderr); raise SystemExit(4)"
    result = run_program((sys.executable, "-c", program), 30)
    assert result == CommandResult(4, "x\n", "bad\n")
    assert result.last_line == "bad"
    assert run((sys.executable, "-c", program), 30) == (4, "bad")
    assert run((sys.executable, "-c", "print(' 7 ')"), 30) == (0, "7")
    assert run((sys.executable, "-c", "raise SystemExit(3)"), 30)[1].endswith(": status 3")


def test_a_program_that_cannot_run_gives_a_status(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    missing = run_program(("no-such-sinfo",), 30)
    assert (missing.status, missing.last_line) == (MISSING, "no-such-sinfo is not installed here")
    assert run_program((str(plain),), 30) == CommandResult(FORBIDDEN, "", f"{plain} may not be run")


def test_a_program_that_does_not_end_is_killed() -> None:
    result = run_program((sys.executable, "-c", "import time; time.sleep(60)"), 0.2)
    assert result.status == OVERDUE
    assert result.last_line.endswith("did not answer within 0.2 s")


def test_variables_that_change_a_submission_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SBATCH_PARTITION": "debug",
        "SLURM_JOB_ID": "3",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SQUEUE_FORMAT": "%i",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_BITSTR_LEN": "64",
        "SLURM_CLUSTERS": "other",
        "PREFECT_API_AUTH_STRING": "admin:x",
        "AWS_REGION": "eu",
    }
    assert client_environment(given.items()) == {
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "AWS_REGION": "eu",
        "LC_ALL": "C.UTF-8",
        "SLURM_TIME_FORMAT": "standard",
        "SLURM_BITSTR_LEN": "0",
    }
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:x")
    program = "import os; print('PREFECT_API_AUTH_STRING' in os.environ)"
    assert run_program((sys.executable, "-c", program), 30).out == "False\n"
