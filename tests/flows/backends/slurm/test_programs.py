"""Programs that are asked something: how they end is told, whatever it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flows.backends.slurm.client import (
    FORBIDDEN,
    MISSING,
    OVERDUE,
    CommandResult,
    client_environment,
    run_program,
)
from flows.doctor.backends import run


def test_a_program_is_run_to_its_end() -> None:
    program = "import sys; print('x'); print('bad', file=sys.stderr); raise SystemExit(4)"
    said = run_program((sys.executable, "-c", program), 30)
    assert said == CommandResult(4, "x\n", "bad\n")
    assert said.last_line == "bad"
    assert run((sys.executable, "-c", program), 30) == (4, "bad")
    assert run((sys.executable, "-c", "print(' 7 ')"), 30) == (0, "7")
    assert run((sys.executable, "-c", "raise SystemExit(3)"), 30)[1].endswith(": status 3")


def test_one_that_cannot_be_run_is_told_so(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    missing = run_program(("no-such-sinfo",), 30)
    assert (missing.status, missing.last_line) == (MISSING, "no-such-sinfo is not installed here")
    assert run_program((str(plain),), 30) == CommandResult(FORBIDDEN, "", f"{plain} may not be run")


def test_one_that_does_not_end_is_not_waited_for() -> None:
    said = run_program((sys.executable, "-c", "import time; time.sleep(60)"), 0.2)
    assert said.status == OVERDUE
    assert said.last_line.endswith("did not answer within 0.2 s")


def test_variables_that_change_what_is_submitted_stay_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
