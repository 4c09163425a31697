"""What the end of a job means: whether it is done, what failed, and whether a retry can help.

`failure.json`, which a stage leaves in its run folder, outranks the exit status: launchers between
a stage and its caller change exit codes. Behind a scheduler there are more sources: its state, the
exit status that launchers passed on, the end of the log. Each may be missing or incomplete."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainyard import json_text
from trainyard.errors import (
    EXIT_DEFECT,
    CommunicationError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    HangError,
    HostMemoryError,
    InfrastructureError,
    RerunElsewhere,
    Stopped,
    ValidationFailed,
)
from trainyard.logging import one_line, printable, shortened


class Kind(StrEnum):
    """How a job ended."""

    DONE = "done"
    DATA = "fault in the data"
    CONFIG = "wrong option"
    INFRASTRUCTURE = "infrastructure"
    """Store or network, unless a narrower kind below applies."""
    DEFECT = "defect of trainyard"
    STOPPED = "stopped"
    """By a person, or by what a person stopped."""
    PREEMPTED = "preempted"
    NODE_FAILURE = "node failure"
    TIME_LIMIT = "time limit"
    OUT_OF_MEMORY = "out of memory"
    """Of the machine, or more than the job asked for."""
    GPU_MEMORY = "out of GPU memory"
    COMMUNICATION = "NCCL or rendezvous"
    HANG = "hang"
    """Without progress or output for longer than allowed."""
    UNKNOWN = "unknown"
    """Without a report, a state or an exit status."""


RETRYABLE = frozenset(
    {
        Kind.INFRASTRUCTURE,
        Kind.PREEMPTED,
        Kind.NODE_FAILURE,
        Kind.TIME_LIMIT,
        Kind.OUT_OF_MEMORY,
        Kind.GPU_MEMORY,
        Kind.COMMUNICATION,
        Kind.HANG,
    }
)
"""Kinds in which the job is not at fault: the same command may succeed if it runs again."""

EXIT_STATUS = {
    Kind.DONE: 0,
    Kind.DATA: DataError.exit_status,
    Kind.CONFIG: ConfigError.exit_status,
    Kind.DEFECT: EXIT_DEFECT,
    Kind.STOPPED: 128 + signal.SIGTERM,
    **dict.fromkeys((*RETRYABLE, Kind.UNKNOWN), InfrastructureError.exit_status),
}
"""Exit status of a program that reports how its job ended."""

KINDS = {
    0: Kind.DONE,
    DataError.exit_status: Kind.DATA,
    ConfigError.exit_status: Kind.CONFIG,
    InfrastructureError.exit_status: Kind.INFRASTRUCTURE,
    RerunElsewhere.exit_status: Kind.INFRASTRUCTURE,
    ValidationFailed.exit_status: Kind.INFRASTRUCTURE,
    EXIT_DEFECT: Kind.DEFECT,
    128 + signal.SIGINT: Kind.STOPPED,
    128 + signal.SIGTERM: Kind.STOPPED,
    128 + signal.SIGUSR1: Kind.TIME_LIMIT,
}
"""What a stage's exit status means. Schedulers send SIGUSR1 ahead of a time limit."""

BY_CLASS = {
    HostMemoryError.__name__: Kind.OUT_OF_MEMORY,
    DeviceMemoryError.__name__: Kind.GPU_MEMORY,
    CommunicationError.__name__: Kind.COMMUNICATION,
    HangError.__name__: Kind.HANG,
}
"""Narrower kinds of an infrastructure failure, by the error class that a stage reports
(stages/runtime/failure.py)."""

BRIEF_CHARS = 160
"""Longest message where a line must be readable at a glance."""

TAIL_BYTES = 2**16
"""End of a log that is searched for a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one attempt."""

    name: str
    kind: Kind
    exit_status: int
    """One of KINDS, whatever number the process ended with."""
    message: str = ""
    error: str = ""
    """Class of the error, if the stage reported it."""
    step: int | None = None
    """Last training step finished before the end, if the stage reported it."""
    failed_shares: tuple[int, ...] = ()
    """Of a job made in shares, those to make again."""

    @property
    def is_retryable(self) -> bool:
        """Whether the same command may succeed if it runs again."""
        return self.kind in RETRYABLE

    @property
    def how(self) -> str:
        """Its kind and last training step: `hang after step 1,200`."""
        return f"{self.kind}" if self.step is None else f"{self.kind} after step {self.step:,}"


# --- from an exit code and failure.json -----------------------------------------------------------


def classify(name: str, returncode: int, failure: Mapping[str, Any] | None) -> Outcome:
    """The outcome that an exit code (negative: killed by that signal) and a failure.json mean."""
    if returncode == 0:
        return Outcome(name=name, kind=Kind.DONE, exit_status=0)
    status, message = _by_code(returncode)
    if failure is not None:
        return from_failure(name, failure, status, message)
    kind = KINDS.get(status, Kind.DEFECT)
    return Outcome(name=name, kind=kind, exit_status=status, message=message)


def from_failure(name: str, failure: Mapping[str, Any], status: int, message: str = "") -> Outcome:
    """The outcome that a failure.json means; status and message replace what it lacks."""
    stated = failure.get("exit_status")
    status = stated if stated in KINDS and stated != 0 else status
    kind = KINDS.get(status, Kind.DEFECT)
    error = one_line(str(failure.get("class") or ""))
    if kind is Kind.INFRASTRUCTURE:
        kind = BY_CLASS.get(error, kind)
    step = failure.get("step")
    return Outcome(
        name=name,
        kind=kind,
        exit_status=status,
        message=printable(shortened(str(failure.get("message") or message))),
        error=error,
        step=step if isinstance(step, int) else None,
    )


def _by_code(code: int) -> tuple[int, str]:
    """Exit status and message for a code without any other explanation."""
    number = -code if code < 0 else code - 128 if 128 < code <= 192 else 0
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        return 128 + number, f"stopped by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        return InfrastructureError.exit_status, (
            "killed by SIGKILL without a report; unless a person did that, the machine ran out of "
            "memory"
        )
    if number in {s.value for s in signal.Signals}:
        return EXIT_DEFECT, f"died of {signal.Signals(number).name}"
    if code in KINDS:
        return code, f"ended with exit status {code}; see its log"
    return EXIT_DEFECT, f"ended with exit status {code}, which no stage uses"


# --- from all that is known of a scheduled job ----------------------------------------------------

MESSAGES = {
    Kind.PREEMPTED: "preempted: other jobs took its nodes",
    Kind.NODE_FAILURE: "a node failed",
    Kind.TIME_LIMIT: "time limit reached; a training saves first and resumes when run again",
    Kind.OUT_OF_MEMORY: "it used more memory than it asked for; raise that, or lower "
    "--micro-batch-size or the processes of a node",
    Kind.STOPPED: "cancelled",
    Kind.HANG: "no output for longer than allowed, so it was ended",
}
"""Ends whose cause the scheduler, or whoever stopped the job, knows better than the job itself."""

HINTS = (
    (
        Kind.GPU_MEMORY,
        re.compile(r"CUDA out of memory|\bOutOfMemoryError\b|ran out of memory on cuda"),
    ),
    (
        Kind.OUT_OF_MEMORY,
        re.compile(r"oom[-_ ]kill|\bOut Of Memory\b|ran out of memory on the host"),
    ),
    (Kind.HANG, re.compile(r"no rank has made progress for \d+ s")),
    (
        Kind.COMMUNICATION,
        re.compile(
            r"Rendezvous\w{0,40}Error|Dist(Backend|Network|Store)Error|NCCL error|"
            r"nccl(Remote|System|UnhandledCuda)Error|Watchdog caught collective operation timeout|"
            r"\[[^\[\]\n]{0,200}gloo[^\[\]\n]{0,200}\] (Connection (closed|reset)|Timed out)|"
            r"rank \d+ of \d+ lost its connection"
        ),
    ),
)
"""What the end of a log means, if there is no better source."""

STRAY = "Slurm requeued it, and then stopped the new run as if it were the old one"
"""Slurm repeats a job's end a minute later to a node that did not answer. If the node and the job
of that id are back by then, it ends the wrong run (seen with Slurm 22.05)."""

TERMINATED, KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL

SILENT = "ended without a reason; see the end of its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """All that is known of the end of one job."""

    failure: Mapping[str, Any] | None = None
    """failure.json."""
    verdict: Kind | None = None
    """What the scheduler's state means; None if that is only `failed`, or gone."""
    message: str = ""
    """The scheduler's own message."""
    exit_code: int | None = None
    """Of the job's script, negative for a signal; None if unknown."""
    is_of_launcher: bool = False
    """The exit code passed through a launcher of ranks, which returns 1 for any failed rank."""
    stop_reason: Kind | None = None
    """Why we stopped the job, such as STOPPED or HANG; None: we did not."""
    was_requeued: bool = False
    """The scheduler ended it before, for a node or for other jobs, and started it again."""
    log_tail: str = ""


def classify_exit(name: str, end: JobEnd) -> Outcome:
    """The outcome that the end means."""
    # A step that is cancelled may end with 0: srun stopped waiting for it.
    if end.verdict is Kind.DONE or (end.verdict is None and end.exit_code == 0):
        return Outcome(name=name, kind=Kind.DONE, exit_status=0)
    report = None
    if end.failure is not None:
        code = end.exit_code
        status = code if code in KINDS and code is not None else EXIT_STATUS[Kind.DEFECT]
        report = from_failure(name, end.failure, status)
    if report is not None and _is_cause(report, end):
        return report
    known = end.stop_reason or end.verdict
    if known in MESSAGES:
        message = f"{MESSAGES[known]} ({end.message})".removesuffix(" ()")
        return of_kind(name, known, message, None if report is None else report.step)
    if report is None:
        return _without_report(name, end)
    if end.was_requeued and report.error == Stopped.__name__ and report.exit_status == TERMINATED:
        return of_kind(name, Kind.NODE_FAILURE, f"{STRAY} ({end.message})", report.step)
    return report


def _is_cause(report: Outcome, end: JobEnd) -> bool:
    """Whether the stage's report is the cause of the end, and not a consequence.

    When a node is lost, ranks on other nodes report a broken connection, or anything else."""
    if report.kind in (Kind.DATA, Kind.CONFIG):
        return True
    lost = (Kind.NODE_FAILURE, Kind.OUT_OF_MEMORY, Kind.PREEMPTED)
    return report.kind is Kind.DEFECT and end.verdict not in lost


def _without_report(name: str, end: JobEnd) -> Outcome:
    hint = next((kind for kind, pattern in HINTS if pattern.search(end.log_tail)), None)
    # A launcher returns 1 if its ranks had only begun, and is killed if it had none.
    may_be_stray = {TERMINATED, 1, KILLED} if end.is_of_launcher else {TERMINATED}
    if end.was_requeued and hint is None and end.exit_code in may_be_stray:
        return of_kind(name, Kind.NODE_FAILURE, f"{STRAY} ({end.message})")
    if end.exit_code is None:
        return of_kind(name, hint or Kind.UNKNOWN, end.message or SILENT)
    outcome = classify(name, end.exit_code, None)
    is_vague = end.is_of_launcher or outcome.kind in (Kind.INFRASTRUCTURE, Kind.DEFECT)
    if hint is not None and is_vague:
        return of_kind(name, hint, f"according to its log ({outcome.message})")
    if end.is_of_launcher and end.exit_code == 1:
        return of_kind(name, Kind.UNKNOWN, SILENT)
    return outcome


def of_kind(name: str, kind: Kind, message: str, step: int | None = None) -> Outcome:
    """An outcome with the exit status of its kind."""
    return Outcome(name=name, kind=kind, exit_status=EXIT_STATUS[kind], message=message, step=step)


def join_shares(name: str, outcomes: Mapping[int | None, Outcome]) -> Outcome:
    """The outcome of a job, from those of its shares by index; a whole job has index None.

    It is that of the first failed share; failures that a retry cannot help come first."""
    if None in outcomes:
        return outcomes[None]
    failed = {i: one for i, one in outcomes.items() if i is not None and one.kind is not Kind.DONE}
    if not failed:
        return Outcome(name=name, kind=Kind.DONE, exit_status=0)
    index = min(failed, key=lambda at: (failed[at].kind in RETRYABLE, at))
    worst = failed[index]
    count = f"{len(failed)} of {len(outcomes)} shares failed ({_listed(sorted(failed))})"
    return Outcome(
        name=name,
        kind=worst.kind,
        exit_status=worst.exit_status,
        message=f"{count}; share {index}: {worst.message}",
        error=worst.error,
        failed_shares=tuple(sorted(failed)),
    )


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, ..."


# --- reports in a run folder ----------------------------------------------------------------------


def read_failure(run_directory: str) -> dict[str, Any] | None:
    """The failure.json of a run folder; None if there is none or it was cut short."""
    return _read(Path(run_directory, "failure.json"))


def read_outcome(run_directory: str) -> dict[str, Any] | None:
    """The outcome.json of a run folder ("noop" or "ran", why, digest); None if there is none."""
    return _read(Path(run_directory, "outcome.json"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json_text.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def read_tail(path: Path) -> str:
    """The end of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


class StageError(Exception):
    """A failed stage: its outcome and the path of its log."""

    def __init__(self, outcome: Outcome, log: str = "", no_retry_reason: str = "") -> None:
        """no_retry_reason: why a retryable outcome is not retried; empty if it may be."""
        super().__init__(outcome, log, no_retry_reason)
        self.outcome, self.log, self.no_retry_reason = outcome, log, no_retry_reason

    @property
    def is_retryable(self) -> bool:
        """Whether the outcome is retryable and the attempts are not used up."""
        return self.outcome.is_retryable and not self.no_retry_reason

    @property
    def exit_status(self) -> int:
        """The class of the failure as an exit status."""
        return self.outcome.exit_status

    def __str__(self) -> str:
        return self._with(self.outcome.message)

    def __repr__(self) -> str:
        """One short line: Prefect writes this into logs and task states, for people."""
        return self._with(brief(self.outcome.message))

    def _with(self, message: str) -> str:
        text = f"{self.outcome.name}: {self.outcome.how}" + (f": {message}" if message else "")
        return f"{text} ({self.no_retry_reason})" if self.no_retry_reason else text


def brief(text: str, most: int = BRIEF_CHARS) -> str:
    """The text on one line, cut to `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 4].rstrip() + " ..."
