"""A Slurm of answers that are played back, and its block on them.

All that a healthy Slurm does is in tests/yard/slurm/test_job.py, on a real one."""

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


MOST_ASKED = 3000
"""Questions of one test."""


@dataclass
class Played:
    """Answers of Slurm's programs; the last of a list is given for ever."""

    scontrol: list[CommandResult]
    squeue: str = ""
    asked: list[str] = field(default_factory=list)
    signalled: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> CommandResult:
        self.asked.append(command[0])
        assert len(self.asked) < MOST_ASKED, "the end is not seen"
        self.signalled += [word for word in command if word == "--signal=USR1"]
        if command[0] == "scontrol":
            return self.scontrol.pop(0) if len(self.scontrol) > 1 else self.scontrol[0]
        told = {"sbatch": CommandResult(0, "17\n", ""), "squeue": CommandResult(0, self.squeue, "")}
        return {"sacct": NO_ACCOUNTING, "scancel": CommandResult(0, "", ""), **told}[command[0]]


def state(name: str, **fields: str) -> CommandResult:
    told = {"JobId": "17", "JobName": "merge-k-1", "JobState": name, **fields}
    return CommandResult(0, " ".join(f"{key}={value}" for key, value in told.items()), "")


class PlayedJob(SlurmJob):
    """Asks the answers that are played back."""

    _block_type_name = "Played Slurm Job"
    _block_type_slug = "played-slurm-job"

    played: Any

    def client(self) -> SlurmClient:
        return SlurmClient(self.played, patience_seconds=1.0, sleep=lambda seconds: None)


def block(folder: Path, played: Played, **values: Any) -> PlayedJob:
    given = {"name": "merge", "command": ("true",), "key": "k-1", **values}
    return PlayedJob(
        spec=LaunchSpec(run_directory=str(folder), **given), played=played, poll_seconds=0
    )


def follow(block: PlayedJob) -> Outcome:
    async def whole() -> Outcome:
        run = await block.trigger()
        await run.wait_for_completion()
        return await run.fetch_result()

    return asyncio.run(whole())


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block waits for comes at once."""
    for name in ("TICK_SECONDS", "FORGOTTEN_SECONDS", "LATE_SECONDS", "KILL_STEPS_SECONDS"):
        monkeypatch.setattr(slurm, name, 0.01)


def write_exit(folder: Path, status: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / EXIT).write_text(json.dumps({"exit_status": status, "job_id": "17"}))


NO_LOG = {"Reason": "RaisedSignal:53(Real-time_signal_19)", "ExitCode": "0:53", "NodeList": "n7"}
"""Of a job whose log could not be opened."""
