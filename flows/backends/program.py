"""Programs that are asked something on this machine, such as Slurm's: they get so long, no longer.

What can be wrong with the program itself is told as a shell would tell it: an exit status and some
words on the error output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flows.backends.spec import OF_PREFECT

OVERDUE = 124
FORBIDDEN = 126
MISSING = 127
"""Exit statuses of a program that did not end, may not be run, or is not there: timeout(1), sh."""

KEPT = ("SLURM_CONF", "SLURM_JWT")
PLAIN = {"LC_ALL": "C.UTF-8", "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
"""So that the same is printed for everybody: lists of tasks whole, which Slurm cuts at 64 bytes,
and times with their day."""

OTHER_CLUSTERS = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a program printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The last line that says what was wrong; empty where nothing was printed."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip() if lines else ""


def run_program(command: Sequence[str], seconds: float) -> CommandResult:
    """Run a program to its end, or for so long."""
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
    """Variables for a client program: not those that change what Slurm's print or what is
    submitted, and not those of Prefect, whose password no stage has a use for.

    SBATCH_PARTITION would win over the script, and within a job SLURM_CPUS_PER_TASK be inherited by
    the jobs that are submitted from it."""
    changing = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SALLOC_", "SRUN_")
    dropped = (*changing, OF_PREFECT)
    kept = {name: v for name, v in variables if name in KEPT or not name.startswith(dropped)}
    return {**kept, **PLAIN}


def other_clusters(variables: Mapping[str, str]) -> str:
    """Why jobs cannot go where these variables send them, in words; empty where they send none."""
    found = next((name for name in OTHER_CLUSTERS if variables.get(name)), None)
    if found is None:
        return ""
    return (
        f"variable {found} ({variables[found]}) sends jobs to other clusters, and they are not "
        f"followed there: unset it where the worker starts, and let SLURM_CONF name the one cluster"
    )
