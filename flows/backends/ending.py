"""What the end of a scheduled job means, from all who saw it.

A process on this machine has one witness, its exit status (`outcome.classify`). Behind a scheduler
there are more, and each of them may be missing or know half: the stage's own failure.json, the
scheduler's state, the exit status that launchers passed on, the last lines of the log. Pure: they
are handed in."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.backends.outcome import (
    EXIT_STATUS,
    KINDS,
    RETRIED,
    Kind,
    Outcome,
    classify,
    reported,
)
from trainyard.errors import Stopped

TOLD = {
    Kind.PREEMPTED: "preempted: others took its nodes",
    Kind.NODE_FAILURE: "a node failed",
    Kind.TIME_LIMIT: "its time was over; training saved and goes on from there when run again",
    Kind.OUT_OF_MEMORY: "it used more memory than it asked for; raise that, or lower "
    "--micro-batch-size or the processes of a node",
    Kind.STOPPED: "cancelled",
    Kind.HANG: "it said nothing for longer than it may, and was ended",
}
"""Ends that a scheduler, or who ended it, knows better than the job itself; in words."""

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
            r"Rendezvous\w*Error|Dist(Backend|Network|Store)Error|NCCL error|"
            r"ncclRemoteError|ncclSystemError|ncclUnhandledCudaError|"
            r"Watchdog caught collective operation timeout|"
            r"\[.*gloo.*\] (Connection (closed|reset)|Timed out)|"
            r"rank \d+ of \d+ lost its connection"
        ),
    ),
)
"""What the log of a job says that ended without any better witness."""

STRAY = "told to stop by nobody, after it had been requeued"
"""To a node that does not answer Slurm repeats, a minute later, to end a job; when the node and the
job of that id are back by then, it ends the wrong run (seen with Slurm 22.05)."""

TERMINATED, KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL

SILENT = "ended without a word about why; the end of its log may tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of the end of one job."""

    failure: Mapping[str, Any] | None = None
    """failure.json."""
    verdict: Kind | None = None
    """What the scheduler's state means; None when it says no more than `failed`, or is gone."""
    words: str = ""
    """The scheduler's own words, for people."""
    exit_code: int | None = None
    """Of the job's script, negative for a signal; None when nobody knows it."""
    is_of_launcher: bool = False
    """The exit code passed through a launcher of ranks, which says 1 whatever a rank said."""
    ended_by_us: Kind | None = None
    """STOPPED or HANG when we told it to stop."""
    was_requeued: bool = False
    """The scheduler had ended it before, for a node or for other jobs, and started it again."""
    log_tail: str = ""


def classify_exit(name: str, seen: Evidence) -> Outcome:
    """The outcome that the evidence means."""
    # A step that is cancelled may end with 0: srun gave up waiting for it.
    if seen.verdict is Kind.DONE or (seen.verdict is None and seen.exit_code == 0):
        return Outcome(name=name, kind=Kind.DONE, exit_status=0)
    report = None if seen.failure is None else reported(name, seen.failure, _status(seen))
    if report is not None and _outweighs(report, seen):
        return report
    told = seen.ended_by_us or seen.verdict
    if told in TOLD:
        words = f"{TOLD[told]} ({seen.words})".removesuffix(" ()")
        return _of_kind(name, told, words, None if report is None else report.step)
    if report is None:
        return _without_report(name, seen)
    if seen.was_requeued and report.error == Stopped.__name__ and report.exit_status == TERMINATED:
        return _stray(name, seen, report.step)
    return report


def _outweighs(report: Outcome, seen: Evidence) -> bool:
    """True when what the stage reported is the cause, and not what it saw of another one.

    Where a node is lost, ranks on others report a broken connection, or anything at all."""
    if report.kind in (Kind.DATA, Kind.CONFIG):
        return True
    lost = (Kind.NODE_FAILURE, Kind.OUT_OF_MEMORY, Kind.PREEMPTED)
    return report.kind is Kind.DEFECT and seen.verdict not in lost


def _stray(name: str, seen: Evidence, step: int | None = None) -> Outcome:
    return _of_kind(name, Kind.NODE_FAILURE, f"{STRAY} ({seen.words})", step)


def _without_report(name: str, seen: Evidence) -> Outcome:
    hint = next((kind for kind, words in HINTS if words.search(seen.log_tail)), None)
    # A launcher says 1 of ranks that had only begun, and is killed where it had none.
    may_be_stray = {TERMINATED, 1, KILLED} if seen.is_of_launcher else {TERMINATED}
    if seen.was_requeued and hint is None and seen.exit_code in may_be_stray:
        return _stray(name, seen)
    if seen.exit_code is None:
        return _of_kind(name, hint or Kind.UNKNOWN, seen.words or SILENT)
    outcome = classify(name, seen.exit_code, None)
    is_vague = seen.is_of_launcher or outcome.kind in (Kind.INFRASTRUCTURE, Kind.DEFECT)
    if hint is not None and is_vague:
        return _of_kind(name, hint, f"its log tells so ({outcome.message})")
    if seen.is_of_launcher and seen.exit_code == 1:
        return _of_kind(name, Kind.UNKNOWN, SILENT)
    return outcome


def _status(seen: Evidence) -> int:
    code = seen.exit_code
    return code if code in KINDS and code is not None else EXIT_STATUS[Kind.DEFECT]


def _of_kind(name: str, kind: Kind, message: str, step: int | None = None) -> Outcome:
    return Outcome(name=name, kind=kind, exit_status=EXIT_STATUS[kind], message=message, step=step)


def join_shares(name: str, outcomes: Mapping[int, Outcome]) -> Outcome:
    """One outcome for a job made in shares: that of the share which is worst, and who failed.

    What nobody can mend by trying again goes before what may succeed later."""
    failed = {index: one for index, one in outcomes.items() if one.kind is not Kind.DONE}
    if not failed:
        return Outcome(name=name, kind=Kind.DONE, exit_status=0)
    index = min(failed, key=lambda at: (failed[at].kind in RETRIED, at))
    worst = failed[index]
    count = f"{len(failed)} of {len(outcomes)} shares failed ({_ranges(sorted(failed))})"
    return Outcome(
        name=name,
        kind=worst.kind,
        exit_status=worst.exit_status,
        message=f"{count}; share {index}: {worst.message}",
        error=worst.error,
        failed_shares=tuple(sorted(failed)),
    )


def _ranges(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, ..."
