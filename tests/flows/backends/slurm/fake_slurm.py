"""A Slurm with recorded answers, and its block. tests/yard/slurm/test_job.py has a real Slurm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.backends.outcome import Outcome
from flows.backends.slurm import job as slurm
from flows.backends.slurm.client import CommandResult, SlurmClient
from flows.backends.slurm.job import SlurmJob
from flows.backends.slurm.script import EXIT
from flows.backends.spec import LaunchSpec

AWAY = CommandResult(
    1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
)
UNKNOWN = CommandResult(1, "", "slurm_load_jobs error: Invalid job id specified")
NO_ACCOUNTING = CommandResult(1, "", "Slurm accounting storage is disabled")

MAX_COMMANDS = 3000
"""Commands of one test."""


@dataclass
class FakeSlurm:
    """Answers of Slurm's programs; the last of a list is given for ever."""

    scontrol: list[CommandResult]
    squeue: str = ""
    has_steps: bool = True
    heeds_scancel: bool = False
    """A job that is gone as soon as it is cancelled."""
    asked: list[str] = field(default_factory=list)
    signalled: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> CommandResult:
        self.asked.append(command[0])
        assert len(self.asked) < MAX_COMMANDS, "the end is not seen"
        self.signalled += [word for word in command if word == "--signal=USR1"]
        is_signal = any("--signal" in word for word in command)
        if command[0] == "scancel" and self.heeds_scancel and not is_signal:
            self.scontrol = [state("CANCELLED")]
        if "--steps" in command:
            return CommandResult(0, "17.0\n17.batch\n" if self.has_steps else "17.batch\n", "")
        if command[0] == "scontrol":
            return self.scontrol.pop(0) if len(self.scontrol) > 1 else self.scontrol[0]
        answers = {
            "sbatch": CommandResult(0, "17\n", ""),
            "squeue": CommandResult(0, self.squeue, ""),
        }
        return {"sacct": NO_ACCOUNTING, "scancel": CommandResult(0, "", ""), **answers}[command[0]]


def state(name: str, **fields: str) -> CommandResult:
    known = {"JobId": "17", "JobName": "merge-k-1", "JobState": name, **fields}
    return CommandResult(0, " ".join(f"{key}={value}" for key, value in known.items()), "")


class FakeSlurmJob(SlurmJob):
    """Asks the Slurm that is played."""

    _block_type_name = "Fake Slurm Job"
    _block_type_slug = "played-slurm-job"

    played: Any
    patience_seconds: float = 1.0

    def client(self) -> SlurmClient:
        return SlurmClient(self.played, self.patience_seconds, sleep=lambda seconds: None)


def block(folder: Path, played: FakeSlurm, **values: Any) -> FakeSlurmJob:
    given = {"name": "merge", "command": ("true",), "key": "k-1", **values}
    return FakeSlurmJob(
        spec=LaunchSpec(run_directory=str(folder), **given), played=played, poll_seconds=0
    )


def follow(block: FakeSlurmJob) -> Outcome:
    async def whole() -> Outcome:
        run = await block.trigger()
        await run.wait_for_completion()
        return await run.fetch_result()

    return asyncio.run(whole())


def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TICK_SECONDS", "FORGOTTEN_SECONDS", "LATE_SECONDS", "KILL_STEPS_SECONDS"):
        monkeypatch.setattr(slurm, name, 0.01)


def write_exit(folder: Path, status: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / EXIT).write_text(json.dumps({"exit_status": status, "job_id": "17"}))


NO_LOG = {"Reason": "RaisedSignal:53(Real-time_signal_19)", "ExitCode": "0:53", "NodeList": "n7"}
"""Of a job whose log could not be opened."""
