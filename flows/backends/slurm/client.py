"""Slurm through its programs on this machine: sbatch, scontrol, squeue, sacct, scancel.

Every version of Slurm has them, with or without accounting and REST. A request is repeated while
the controller is unavailable; sbatch only after checking that the first one did not get through."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.backends import contact
from flows.backends.backoff import pauses
from flows.backends.contact import Contact
from flows.backends.errors import BackendUnavailableError, NoRoomError
from flows.backends.slurm.records import (
    JobRecord,
    job_ids,
    parse_sacct,
    parse_scontrol,
    parse_submitted,
)
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.variables import OF_PREFECT

AWAY = re.compile(
    r"Unable to contact slurm|Socket timed out|Connection (refused|timed out|reset)|"
    r"standby mode|Zero Bytes were transmitted|Unable to establish|Transport endpoint|"
    r"Unexpected message received|Resource temporarily unavailable",
    re.IGNORECASE,
)
"""Errors of Slurm's programs that are not the fault of the request."""

FULL = re.compile(r"\b(Assoc|QOS)(Max|Grp)Submit\w*|too many jobs|job queue full", re.IGNORECASE)
"""Refusals that go away when other jobs end. Slurm adds one line, the same for all limits: `Job
violates accounting/QOS policy (job submit limit, user's size and/or time limits)`."""

PATIENCE_SECONDS = 120.0
"""How long a request is repeated, including the time that the programs take."""
COMMAND_SECONDS = 60.0

OVERDUE = 124
FORBIDDEN = 126
MISSING = 127
"""Exit statuses as of timeout(1) and sh: timed out, not executable, not found."""

KEPT = ("SLURM_CONF", "SLURM_JWT")
PLAIN = {"LC_ALL": "C.UTF-8", "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
"""Makes the output independent of the user's settings: whole lists of tasks, which Slurm cuts at 64
bytes by default, and times with their day."""

OTHER_CLUSTERS = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a program printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line of the error output, else of the output; empty if there is none."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip() if lines else ""


def run_program(command: Sequence[str], seconds: float) -> CommandResult:
    """Run a program for at most `seconds`; status OVERDUE, FORBIDDEN or MISSING if that fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=client_environment(os.environ.items()),
            timeout=seconds,
        )
    except FileNotFoundError:
        return CommandResult(MISSING, "", f"{command[0]} is not installed here")
    except PermissionError:
        return CommandResult(FORBIDDEN, "", f"{command[0]} may not be run")
    except subprocess.TimeoutExpired:
        return CommandResult(OVERDUE, "", f"{command[0]} did not answer within {seconds:g} s")
    return CommandResult(done.returncode, done.stdout, done.stderr)


def client_environment(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Variables for a client program, without those that change what Slurm prints or submits, and
    without Prefect's.

    SBATCH_PARTITION would override the script, and in a job SLURM_CPUS_PER_TASK would be inherited
    by the jobs submitted from it."""
    changing = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SALLOC_", "SRUN_")
    dropped = (*changing, OF_PREFECT)
    kept = {name: v for name, v in variables if name in KEPT or not name.startswith(dropped)}
    return {**kept, **PLAIN}


def other_clusters(variables: Mapping[str, str]) -> str:
    """Why jobs cannot go to the cluster that these variables name; empty if they name none."""
    found = next((name for name in OTHER_CLUSTERS if variables.get(name)), None)
    if found is None:
        return ""
    return (
        f"variable {found} ({variables[found]}) sends jobs to other clusters, where they are "
        f"not followed: unset it where the worker starts, and let SLURM_CONF name the one cluster"
    )


Runner = Callable[[Sequence[str]], CommandResult]
"""Runs one of Slurm's programs to its end, here or on another machine."""


def run_here(command: Sequence[str]) -> CommandResult:
    """Run one of Slurm's programs on this machine; ConfigError if it cannot be run."""
    result = run_program(command, COMMAND_SECONDS)
    if result.status in (MISSING, FORBIDDEN):
        raise ConfigError(
            f"{result.last_line}: the Slurm backend needs Slurm's client programs in PATH"
        )
    if result.status == OVERDUE:
        return CommandResult(1, "", f"{command[0]}: Socket timed out after {COMMAND_SECONDS:.0f} s")
    return result


@dataclass(slots=True)
class SlurmClient:
    """The requests of the Slurm backend."""

    run: Runner = run_here
    patience_seconds: float = PATIENCE_SECONDS
    sleep: Callable[[float], None] = time.sleep
    contact: Contact = field(default_factory=contact.current)
    _has_accounting: bool = field(default=True, init=False)

    def submit(self, script: Path, name: str) -> str:
        """Submit a script whose job has this name; the job's id.

        ConfigError if Slurm refuses it, NoRoomError while the queue is full,
        BackendUnavailableError if the controller does not answer."""
        command = ("sbatch", "--parsable", str(script))
        for pause in pauses(self.patience_seconds):
            if pause:
                self.sleep(pause)
                if (found := self.find(name)) is not None:
                    return found
            result = self._try(command)
            if result.status == 0:
                return parse_submitted(result.out)
            if not AWAY.search(result.err):
                break
        lines = _lines(result.err)
        if AWAY.search(result.err):
            raise BackendUnavailableError(f"sbatch {script}: {lines[-1]}")
        message = "; ".join(lines)
        if FULL.search(result.err):
            raise NoRoomError(f"sbatch {script}: {message}")
        raise ConfigError(
            f"sbatch {script} was refused: {message}. Correct the Slurm options of the yard or the "
            f"job's resources"
        )

    def find(self, name: str) -> str | None:
        """The newest job of a name, waiting, running or ended; None if Slurm knows none."""
        asked = ("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%F")
        found = job_ids(self._ask(asked).out)
        if not found:
            history = ("--starttime=now-30days", f"--name={name}", "--format=JobID")
            found = job_ids(self._account(*history))
        return max(found, key=int, default=None)

    def records(self, job_id: str, shares: Collection[int] = ()) -> list[JobRecord]:
        """The records of a job and its tasks; empty if Slurm does not know the job, or not yet.

        shares: those whose end is needed; the controller forgets them one by one."""
        result = self._ask(("scontrol", "show", "job", "--oneliner", job_id), "Invalid job id")
        found = parse_scontrol(result.out) if result.status == 0 else []
        lost = set(shares).difference(*(record.shares for record in found))
        if found and not lost:
            return found
        wanted = "--format=JobID,State,ExitCode,NodeList,JobName"
        past = parse_sacct(self._account(f"--jobs={job_id}", wanted))
        return [*found, *(r for r in past if r.has_ended and lost & {*r.shares})] if found else past

    def has_steps(self, job_id: str) -> bool:
        """Whether srun has started something in a running job."""
        asked = ("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i")
        found = self._ask(asked, "Invalid job id").out.split()
        return any(step.endswith(".0") for step in found)

    def signal_steps(self, job_id: str, signal_name: str) -> None:
        """Send a signal to the processes of a running job."""
        self._ask(("scancel", "--quiet", f"--signal={signal_name}", job_id), "")

    def kill_steps(self, job_id: str, indices: Sequence[int] = ()) -> None:
        """Kill the processes of a running job, or of these tasks of an array, without KillWait.

        It addresses the one step: SIGKILL for a whole job would begin with scancel's SIGTERM."""
        steps = [f"{job_id}_{index}.0" for index in indices] or [f"{job_id}.0"]
        self._ask(("scancel", "--quiet", "--signal=KILL", *steps), "")

    def cancel(self, job_id: str) -> None:
        """Cancel a job; its records show when it has ended."""
        self._ask(("scancel", "--quiet", job_id), "")

    def _account(self, *arguments: str) -> str:
        if not self._has_accounting:
            return ""
        base = ("sacct", "--allocations", "--noheader", "--parsable2")
        result = self._ask((*base, *arguments), "")
        self._has_accounting = "accounting storage is disabled" not in result.err
        return result.out if result.status == 0 else ""

    def _ask(self, command: Sequence[str], allowed: str | None = None) -> CommandResult:
        """Repeat a request until the controller answers; allowed: an error that is an answer."""
        for pause in pauses(self.patience_seconds):
            if pause:
                self.sleep(pause)
            result = self._try(command)
            if result.status == 0:
                return result
            if not AWAY.search(result.err):
                break
        is_away = AWAY.search(result.err)
        if allowed is not None and allowed in result.err and not is_away:
            return result
        kind = BackendUnavailableError if is_away else InfrastructureError
        raise kind(f"{' '.join(command)}: {_lines(result.err)[-1]}")

    def _try(self, command: Sequence[str]) -> CommandResult:
        self.contact.ask()
        result = self.run(command)
        if result.status != 0 and AWAY.search(result.err):
            self.contact.fail(_lines(result.err)[-1])
        else:
            self.contact.answer()
        return result


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()] or ["no reason given"]
