"""What Slurm's programs print about jobs, as records. Pure.

`scontrol show job -o` knows jobs until MinJobAge after their end. `sacct` knows them for months,
where there is accounting, but its rows lag by seconds: no row means `not yet`, never `gone`."""

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
"""States that a job does not leave, and what each means; None: the exit status has to tell."""

FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z/:]*)=")
SHOWN = frozenset(
    {
        *("JobId", "ArrayJobId", "ArrayTaskId", "JobName", "JobState", "Reason", "ExitCode"),
        *("Restarts", "Comment", "NodeList", "StartTime", "EndTime", "PreemptTime"),
    }
)
TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
"""`2`, `0-4` or `0-4:2` of the tasks of an array."""
NOTHING = ("", "(null)", "None", "N/A")

NEVER = {
    "DependencyNeverSatisfied": "it depends on a job that failed",
    "PartitionConfig": "no partition has so many nodes",
    "PartitionNodeLimit": "the partition does not allow so many nodes",
    "PartitionTimeLimit": "the partition does not allow so long a time limit",
    "BadConstraints": "no node has all that is asked for",
    "InvalidAccount": "its account is none, or has no right to the partition",
    "InvalidQOS": "its quality of service is none, or not for its account",
    "ReservationDeleted": "its reservation is gone",
}
"""Reasons of waiting that do not go away by waiting, in words."""

TOO_MUCH = re.compile(r"(Assoc|QOS)Max\w+PerJob(Limit)?")
"""Reasons of a job that alone asks for more than its account, or its quality of service, allows."""

HELD = {
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "it is held by an administrator",
}
"""Reasons of waiting until a person wants otherwise, in words."""

NO_LOG = -53
"""Exit code, `0:53`, of a job whose log its node could not open; the script never began. Slurm's
reason is JobLaunchFailure, or RaisedSignal:53(Real-time_signal_19)."""

NOT_STARTED = "launch_failed_requeued_held"
"""A node could not start the job; Slurm put it back into the queue and holds it there for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job, one task of an array, or the tasks of an array that still wait together."""

    job_id: str
    """Of the array, for its tasks: what sbatch printed."""
    state: str
    name: str = ""
    reason: str = ""
    exit_code: int = 0
    """Of the script; negative when a signal ended it."""
    restarts: int = 0
    shares: tuple[int, ...] = ()
    """Indices in an array."""
    nodes: str = ""
    started: float | None = None
    """When it last began, in seconds since 1970; of a job that waits, when it may."""
    ended: float | None = None
    """When it ended; of one that runs, when it has to."""
    preempted: float | None = None
    """When Slurm chose it to make room for others, and its grace began."""

    @property
    def has_ended(self) -> bool:
        """True in a state that it does not leave."""
        return self.state in ENDED

    @property
    def was_not_started(self) -> bool:
        """True when a node failed to start it and Slurm will not try again."""
        return self.state == "PENDING" and self.reason.replace(" ", "_") == NOT_STARTED

    @property
    def never_starts(self) -> str | None:
        """Why it will not start however long it waits, in words; None when it may."""
        if self.state != "PENDING":
            return None
        if TOO_MUCH.fullmatch(self.reason):
            return "it asks for more than its account or its quality of service allows one job"
        return NEVER.get(self.reason)

    @property
    def was_preempted(self) -> bool:
        """True when it had to make room, in this run of it."""
        return self.preempted is not None and self.preempted >= (self.started or 0)

    @property
    def verdict(self) -> Kind | None:
        """What the end means; None where the exit status has to tell."""
        if self.state in ("FAILED", "TIMEOUT") and self.was_preempted:
            return Kind.PREEMPTED  # it left within its grace, as it should, and is not requeued
        if self.state == "FAILED" and self.reason == "JobLaunchFailure":
            return Kind.NODE_FAILURE
        return ENDED.get(self.state)

    @property
    def had_no_log(self) -> bool:
        """True when its log could not be opened, unless something shows that its script began."""
        return self.state == "FAILED" and self.exit_code == NO_LOG

    @property
    def words(self) -> str:
        """State, reason and nodes, for people."""
        nodes = f"on {self.nodes}" if self.nodes else ""
        return " ".join(filter(None, ("Slurm says", self.state, self.reason, nodes)))


def parse_scontrol(text: str) -> list[JobRecord]:
    """The records of `scontrol show job -o`."""
    return [_record(fields) for line in text.splitlines() if (fields := _fields(line))]


def _fields(line: str) -> dict[str, str]:
    """Values by name. A name of a job or a comment may hold spaces, not ` Word=`.

    Of two of a name the first counts: it stands before anything that people wrote."""
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
        return "" if value in NOTHING else value

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
            nodes="" if nodes in (*NOTHING, "None assigned") else nodes,
        )
        found.append(record)
    return found


def job_ids(text: str) -> list[str]:
    """The ids that `squeue -h -o %F` or `sacct -o JobID` print, once each, in order."""
    bare = (line.strip().partition("_")[0] for line in text.splitlines())
    return list(dict.fromkeys(filter(None, bare)))


def parse_submitted(text: str) -> str:
    """The id that `sbatch --parsable` prints: `17` or `17;cluster`, behind what plugins say."""
    lines = [line for line in text.splitlines() if re.match(r"\d+(;|$)", line)]
    if not lines:
        raise ValueError(f"sbatch printed no job id, but {text!r}")
    return lines[-1].partition(";")[0]


def _moment(text: str) -> float | None:
    """Of a time as Slurm prints it, by the clock on the wall; it says Unknown where there is none.

    A cluster and those who submit to it share a time zone, or no time that is printed is right."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _exit_code(text: str) -> int:
    """`code:signal` as one number, negative for a signal."""
    code, _, number = text.partition(":")
    return -int(number) if number and int(number) else int(code or 0)


def _indices(text: str) -> Iterator[int]:
    """`2`, or of tasks that wait together `0-2,5%4`. Of a list that is cut, `0-2,5,1...`, those
    that are whole: the rest is not known."""
    for part in text.partition("%")[0].split(","):
        if (tasks := TASKS.fullmatch(part)) is not None:
            first, last, step = tasks.groups()
            yield from range(int(first), int(last or first) + 1, int(step or 1))
