"""Parses what Slurm's programs print about jobs. Pure.

`scontrol show job -o` knows jobs until MinJobAge after their end. With accounting, `sacct` knows
them for months, but its rows lag by seconds: no row means `not yet`, never `gone`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flows.backends.outcome import Kind

ENDED = {
    "COMPLETED": Kind.DONE,
    "FAILED": None,
    "CANCELLED": Kind.STOPPED,
    "REVOKED": Kind.STOPPED,
    "TIMEOUT": Kind.TIME_LIMIT,
    "DEADLINE": Kind.TIME_LIMIT,
    "PREEMPTED": Kind.PREEMPTED,
    "NODE_FAIL": Kind.NODE_FAILURE,
    "BOOT_FAIL": Kind.NODE_FAILURE,
    "LAUNCH_FAILED": Kind.NODE_FAILURE,
    "OUT_OF_MEMORY": Kind.OUT_OF_MEMORY,
}
"""Final states, and what each means; None: the exit status decides."""

FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z/:]*)=")
SHOWN = frozenset(
    {
        *("JobId", "ArrayJobId", "ArrayTaskId", "JobName", "JobState", "Reason", "ExitCode"),
        *("Restarts", "Comment", "NodeList", "StartTime", "EndTime", "PreemptTime"),
    }
)
TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
"""`2`, `0-4` or `0-4:2` of the tasks of an array."""
EMPTY_VALUES = ("", "(null)", "None", "N/A")

NEVER = {
    "DependencyNeverSatisfied": "it depends on a job that failed",
    "PartitionConfig": "no partition has this many nodes",
    "PartitionNodeLimit": "the partition does not allow this many nodes",
    "PartitionTimeLimit": "the partition does not allow so long a time limit",
    "BadConstraints": "no node has all that is asked for",
    "InvalidAccount": "its account does not exist, or may not use the partition",
    "InvalidQOS": "its quality of service does not exist, or is not for its account",
    "ReservationDeleted": "its reservation was deleted",
}
"""Reasons of waiting that never go away."""

TOO_MUCH = re.compile(r"(Assoc|QOS)Max\w+PerJob(Limit)?")
"""Reasons of a job that asks for more than its account or quality of service allows one job."""

HELD = {
    "JobHeldUser": "it is held; `scontrol release` releases it",
    "JobHeldAdmin": "it is held by an administrator",
}
"""Reasons of waiting until a person releases the job."""

NO_LOG = -53
"""Exit code, `0:53`, of a job whose node could not open its log; the script never began. Slurm's
reason is JobLaunchFailure, or RaisedSignal:53(Real-time_signal_19)."""

NOT_STARTED = "launch_failed_requeued_held"
"""A node could not start the job; Slurm requeued it and holds it for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job, one task of an array, or the waiting tasks of an array together."""

    job_id: str
    """What sbatch printed; for a task, the id of its array."""
    state: str
    name: str = ""
    reason: str = ""
    exit_code: int = 0
    """Of the script; negative if a signal ended it."""
    restarts: int = 0
    shares: tuple[int, ...] = ()
    """Indices in an array."""
    nodes: str = ""
    started: float | None = None
    """Start of its last run, in seconds since 1970; the expected start while it waits."""
    ended: float | None = None
    """When it ended; its deadline while it runs."""
    preempted: float | None = None
    """When Slurm chose it for preemption and its grace began."""

    @property
    def has_ended(self) -> bool:
        """Whether it is in a final state."""
        return self.state in ENDED

    @property
    def was_not_started(self) -> bool:
        """Whether a node failed to start it and Slurm will not try again."""
        return self.state == "PENDING" and self.reason.replace(" ", "_") == NOT_STARTED

    @property
    def never_starts(self) -> str | None:
        """Why it can never start; None if it may."""
        if self.state != "PENDING":
            return None
        if TOO_MUCH.fullmatch(self.reason):
            return "it asks for more than its account or its quality of service allows one job"
        return NEVER.get(self.reason)

    @property
    def was_preempted(self) -> bool:
        """Whether it was preempted in its last run."""
        return self.preempted is not None and self.preempted >= (self.started or 0)

    @property
    def verdict(self) -> Kind | None:
        """What the end means; None if the exit status decides."""
        if self.state in ("FAILED", "TIMEOUT") and self.was_preempted:
            return Kind.PREEMPTED  # it exited within its grace, as it should, and is not requeued
        if self.state == "FAILED" and self.reason == "JobLaunchFailure":
            return Kind.NODE_FAILURE
        return ENDED.get(self.state)

    @property
    def had_no_log(self) -> bool:
        """Whether its log could not be opened and nothing shows that its script began."""
        return self.state == "FAILED" and self.exit_code == NO_LOG

    @property
    def summary(self) -> str:
        """State, reason and nodes, for people."""
        nodes = f"on {self.nodes}" if self.nodes else ""
        return " ".join(filter(None, ("Slurm says", self.state, self.reason, nodes)))


def parse_scontrol(text: str) -> list[JobRecord]:
    """The records of `scontrol show job -o`."""
    return [_record(fields) for line in text.splitlines() if (fields := _fields(line))]


def _fields(line: str) -> dict[str, str]:
    """Values by name. A job name or a comment may hold spaces, but not ` Word=`.

    The first of two equal names counts: it precedes all text that people wrote."""
    found: dict[str, str] = {}
    matches = list(FIELD.finditer(line))
    ends = [match.start() for match in matches] + [len(line)]
    for match, end in zip(matches, ends[1:], strict=True):
        if match[1] in SHOWN:
            found.setdefault(match[1], line[match.end() : end].strip())
    return found if "JobId" in found else {}


def _record(fields: dict[str, str]) -> JobRecord:
    def text(name: str) -> str:
        value = fields.get(name, "")
        return "" if value in EMPTY_VALUES else value

    return JobRecord(
        job_id=text("ArrayJobId") or text("JobId"),
        state=text("JobState"),
        name=text("JobName"),
        reason=text("Reason"),
        exit_code=_exit_code(text("ExitCode")),
        restarts=int(text("Restarts") or 0),
        shares=tuple(_indices(text("ArrayTaskId"))),
        nodes=text("NodeList"),
        started=_moment(text("StartTime")),
        ended=_moment(text("EndTime")),
        preempted=_moment(text("PreemptTime")),
    )


def parse_sacct(text: str) -> list[JobRecord]:
    """The records of `sacct -X -n --parsable2 --format=JobID,State,ExitCode,NodeList,JobName`."""
    found = []
    for line in text.splitlines():
        job, state, code, nodes, name = line.split("|", 4)
        number, _, shares = job.partition("_")
        record = JobRecord(
            job_id=number,
            state=state.split()[0].rstrip("+"),  # CANCELLED by 1000
            name=name,
            exit_code=_exit_code(code),
            shares=tuple(_indices(shares.strip("[]"))),
            nodes="" if nodes in (*EMPTY_VALUES, "None assigned") else nodes,
        )
        found.append(record)
    return found


def job_ids(text: str) -> list[str]:
    """The ids that `squeue -h -o %F` or `sacct -o JobID` prints, once each, in order."""
    bare = (line.strip().partition("_")[0] for line in text.splitlines())
    return list(dict.fromkeys(filter(None, bare)))


def parse_submitted(text: str) -> str:
    """The id that `sbatch --parsable` prints, after lines of plugins: `17` or `17;cluster`."""
    lines = [line for line in text.splitlines() if re.match(r"\d+(;|$)", line)]
    if not lines:
        raise ValueError(f"sbatch printed no job id, but {text!r}")
    return lines[-1].partition(";")[0]


def _moment(text: str) -> float | None:
    """Seconds since 1970 of a time as Slurm prints it; None for Unknown.

    Slurm prints local time, so the cluster and this machine must share a time zone."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _exit_code(text: str) -> int:
    """`code:signal` as one number, negative for a signal."""
    code, _, number = text.partition(":")
    return -int(number) if number and int(number) else int(code or 0)


def _indices(text: str) -> Iterator[int]:
    """`2`, or of waiting tasks `0-2,5%4`. Of a truncated list, `0-2,5,1...`, the whole ones."""
    for part in text.partition("%")[0].split(","):
        if (tasks := TASKS.fullmatch(part)) is not None:
            first, last, step = tasks.groups()
            yield from range(int(first), int(last or first) + 1, int(step or 1))
