"""Slurm through its own programs, on this machine: sbatch, scontrol, squeue, sacct, scancel.

Every version of Slurm has them, with or without accounting and REST. A controller that is away for
a moment is waited for; sbatch is repeated only after looking whether the first one got through."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flows.backends.backoff import NoRoomError
from flows.backends.errors import BackendUnavailableError
from flows.backends.program import FORBIDDEN, MISSING, OVERDUE, CommandResult, run_program
from flows.backends.slurm.records import (
    JobRecord,
    job_ids,
    parse_sacct,
    parse_scontrol,
    parse_submitted,
)
from trainyard.errors import ConfigError, InfrastructureError

AWAY = re.compile(
    r"Unable to contact slurm|Socket timed out|Connection (refused|timed out|reset)|"
    r"standby mode|Zero Bytes were transmitted|Unable to establish|Transport endpoint|"
    r"Unexpected message received|Resource temporarily unavailable",
    re.IGNORECASE,
)
"""What Slurm's programs say when it is not the question that is at fault."""

FULL = re.compile(r"\b(Assoc|QOS)(Max|Grp)Submit\w*|too many jobs|job queue full", re.IGNORECASE)
"""Reasons of a refusal that go away when other jobs end. Slurm's line beside them, `Job violates
accounting/QOS policy (job submit limit, user's size and/or time limits)`, is that of all limits."""

PATIENCE_SECONDS = 120.0
"""So long a controller may be away, the time that its programs take to say so included."""
COMMAND_SECONDS = 60.0
MOST_PAUSE_SECONDS = 15.0


class Runner(Protocol):
    """Runs one of Slurm's programs; elsewhere, if need be."""

    def __call__(self, command: Sequence[str]) -> CommandResult:
        """Run it to its end."""


def run_here(command: Sequence[str]) -> CommandResult:
    """Run a program of Slurm on this machine. ConfigError for one that cannot be run."""
    said = run_program(command, COMMAND_SECONDS)
    if said.status in (MISSING, FORBIDDEN):
        raise ConfigError(f"{said.words}: the Slurm block needs Slurm's client programs in PATH")
    if said.status == OVERDUE:
        return CommandResult(1, "", f"{command[0]}: Socket timed out after {COMMAND_SECONDS:.0f} s")
    return said


@dataclass(slots=True)
class SlurmClient:
    """The questions and orders of a job block."""

    run: Runner = run_here
    patience_seconds: float = PATIENCE_SECONDS
    sleep: Callable[[float], None] = time.sleep
    _has_accounting: bool = field(default=True, init=False)

    def submit(self, script: Path, name: str) -> str:
        """Submit a script whose job has this name; the job's id.

        ConfigError for what Slurm refuses, NoRoomError while it has no room, PlaceAwayError when
        it cannot be reached."""
        command = ("sbatch", "--parsable", str(script))
        for pause in self._pauses():
            if pause:
                self.sleep(pause)
                if (found := self.find(name)) is not None:
                    return found
            said = self.run(command)
            if said.status == 0:
                return parse_submitted(said.out)
            if not AWAY.search(said.err):
                break
        if AWAY.search(said.err):
            raise BackendUnavailableError(f"sbatch {script}: {_lines(said.err)[-1]}")
        words = "; ".join(_lines(said.err))
        if FULL.search(said.err):
            raise NoRoomError(f"sbatch {script}: {words}")
        raise ConfigError(
            f"sbatch {script} was refused: {words}. Correct the Slurm options of the yard or the "
            f"job's resources"
        )

    def find(self, name: str) -> str | None:
        """The newest job of a name, waiting, running or ended; None when Slurm knows none."""
        asked = ("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%F")
        found = job_ids(self._ask(asked).out)
        if not found:
            history = ("--starttime=now-30days", f"--name={name}", "--format=JobID")
            found = job_ids(self._account(*history))
        return max(found, key=int, default=None)

    def records(self, job_id: str, shares: Collection[int] = ()) -> list[JobRecord]:
        """What Slurm says of a job and its tasks; empty when it knows nothing, or not yet.

        shares: those whose end is to be found; the controller forgets one after the other."""
        said = self._ask(("scontrol", "show", "job", "--oneliner", job_id), "Invalid job id")
        found = parse_scontrol(said.out) if said.status == 0 else []
        lost = set(shares).difference(*(record.shares for record in found))
        if found and not lost:
            return found
        wanted = "--format=JobID,State,ExitCode,NodeList,JobName"
        past = parse_sacct(self._account(f"--jobs={job_id}", wanted))
        return [*found, *(r for r in past if r.has_ended and lost & {*r.shares})] if found else past

    def signal_steps(self, job_id: str, signal_name: str) -> None:
        """Send a signal to the processes of a running job."""
        self._ask(("scancel", "--quiet", f"--signal={signal_name}", job_id), "")

    def kill_steps(self, job_id: str, indices: Sequence[int] = ()) -> None:
        """End the processes of a running job, or of these tasks of an array, without KillWait.

        Its one step is meant: SIGKILL for a whole job would be scancel's SIGTERM first."""
        steps = [f"{job_id}_{index}.0" for index in indices] or [f"{job_id}.0"]
        self._ask(("scancel", "--quiet", "--signal=KILL", *steps), "")

    def cancel(self, job_id: str) -> None:
        """Tell Slurm to end a job; whether it has ended, its records tell."""
        self._ask(("scancel", "--quiet", job_id), "")

    def _account(self, *arguments: str) -> str:
        if not self._has_accounting:
            return ""
        base = ("sacct", "--allocations", "--noheader", "--parsable2")
        said = self._ask((*base, *arguments), "")
        self._has_accounting = "accounting storage is disabled" not in said.err
        return said.out if said.status == 0 else ""

    def _ask(self, command: Sequence[str], allowed: str | None = None) -> CommandResult:
        """Ask until the controller answers; `allowed` is an error that is an answer."""
        for pause in self._pauses():
            if pause:
                self.sleep(pause)
            said = self.run(command)
            if said.status == 0:
                return said
            if not AWAY.search(said.err):
                break
        if allowed is not None and allowed in said.err and not AWAY.search(said.err):
            return said
        kind = BackendUnavailableError if AWAY.search(said.err) else InfrastructureError
        raise kind(f"{' '.join(command)}: {_lines(said.err)[-1]}")

    def _pauses(self) -> Iterator[float]:
        """Seconds before each try: none before the first, then doubling, until the patience is
        over."""
        began, paused, pause = time.monotonic(), 0.0, 0.5
        yield 0.0
        while max(paused, time.monotonic() - began) < self.patience_seconds:
            yield pause
            paused += pause
            pause = min(2 * pause, MOST_PAUSE_SECONDS)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()] or ["no word of why"]
