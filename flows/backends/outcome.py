"""What the end of a job means: done, or whose fault it was and whether trying again can help.

`failure.json`, which a stage leaves in its run folder, is believed before the exit status:
launchers between a stage and its caller change exit codes."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

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
    ValidationFailed,
)


class Kind(StrEnum):
    """How a job ended."""

    DONE = "done"
    DATA = "fault in the data"
    CONFIG = "wrong option"
    INFRASTRUCTURE = "infrastructure"
    """Store or network; what no narrower kind below says better."""
    DEFECT = "defect of trainyard"
    STOPPED = "stopped"
    """By a person, or by what a person stopped."""
    PREEMPTED = "preempted"
    NODE_FAILURE = "node failure"
    TIME_LIMIT = "time limit"
    OUT_OF_MEMORY = "out of memory"
    """The machine, or the part of it that the job asked for."""
    GPU_MEMORY = "out of GPU memory"
    COMMUNICATION = "NCCL or rendezvous"
    HANG = "hang"
    """It ran, and for longer than it may made no progress or said nothing."""
    UNKNOWN = "unknown"
    """It ended and nobody left a word: no report, no state, no exit status."""


RETRIED = frozenset(
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
"""Nothing is wrong with what was asked for: the same command may end well, where it left off."""

EXIT_STATUS = {
    Kind.DONE: 0,
    Kind.DATA: DataError.exit_status,
    Kind.CONFIG: ConfigError.exit_status,
    Kind.DEFECT: EXIT_DEFECT,
    Kind.STOPPED: 128 + signal.SIGTERM,
    **dict.fromkeys((*RETRIED, Kind.UNKNOWN), InfrastructureError.exit_status),
}
"""What a program ends with that has to say how its job ended."""

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
"""What a stage's exit status means; SIGUSR1 is what a scheduler sends ahead of a time limit."""

BY_CLASS = {
    HostMemoryError.__name__: Kind.OUT_OF_MEMORY,
    DeviceMemoryError.__name__: Kind.GPU_MEMORY,
    CommunicationError.__name__: Kind.COMMUNICATION,
    HangError.__name__: Kind.HANG,
}
"""Narrower kinds of an infrastructure failure, by the class of the error that a stage reports
(stages/runtime/failure.py)."""

BRIEF_CHARS = 160
"""Of a message, where a line is to be read at a glance."""

TAIL_BYTES = 2**16
"""Of a log, as much as is looked through for a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one attempt."""

    name: str
    kind: Kind
    exit_status: int
    """The contract's: one of KINDS, whatever number the process ended with."""
    message: str = ""
    error: str = ""
    """Class of the error, when the stage said it."""
    step: int | None = None
    """Last training step that was finished before it happened, when the stage said it."""
    failed_shares: tuple[int, ...] = ()
    """Of a job made in shares, those that have to be made again."""

    @property
    def may_succeed_later(self) -> bool:
        """True when the same command is worth trying again."""
        return self.kind in RETRIED

    @property
    def how(self) -> str:
        """Its kind, and how far a training was: `hang after step 1,200`."""
        return f"{self.kind}" if self.step is None else f"{self.kind} after step {self.step:,}"


def classify(name: str, returncode: int, failure: Mapping[str, Any] | None) -> Outcome:
    """The outcome that an exit code (negative: killed by that signal) and a failure.json mean."""
    if returncode == 0:
        return Outcome(name=name, kind=Kind.DONE, exit_status=0)
    status, message = _by_code(returncode)
    if failure is None:
        return Outcome(
            name=name, kind=KINDS.get(status, Kind.DEFECT), exit_status=status, message=message
        )
    return reported(name, failure, status, message)


def reported(name: str, failure: Mapping[str, Any], status: int, message: str = "") -> Outcome:
    """The outcome that a failure.json means; status and message are for what it does not say."""
    said = failure.get("exit_status")
    status = said if said in KINDS and said != 0 else status
    kind, error = KINDS.get(status, Kind.DEFECT), str(failure.get("class") or "")
    if kind is Kind.INFRASTRUCTURE:
        kind = BY_CLASS.get(error, kind)
    step = failure.get("step")
    return Outcome(
        name=name,
        kind=kind,
        exit_status=status,
        message=str(failure.get("message") or message),
        error=error,
        step=step if isinstance(step, int) else None,
    )


def _by_code(code: int) -> tuple[int, str]:
    """Exit status of the contract and words for a code that nothing else explains."""
    number = -code if code < 0 else code - 128 if 128 < code <= 192 else 0
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        return 128 + number, f"stopped by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        return InfrastructureError.exit_status, (
            "killed by SIGKILL without a word; when nobody did that, the machine ran out of memory"
        )
    if number in {s.value for s in signal.Signals}:
        return EXIT_DEFECT, f"died of {signal.Signals(number).name}"
    if code in KINDS:
        return code, f"ended with exit status {code}; its log says why"
    return EXIT_DEFECT, f"ended with exit status {code}, which is none that a stage ends with"


def read_failure(run_directory: str) -> dict[str, Any] | None:
    """The failure.json of a run folder; None when there is none or it was cut short."""
    return _read(Path(run_directory, "failure.json"))


def read_outcome(run_directory: str) -> dict[str, Any] | None:
    """The outcome.json of a run folder ("noop" or "ran", why, digest); None when there is none."""
    return _read(Path(run_directory, "outcome.json"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def read_tail(path: Path) -> str:
    """The end of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


class StageError(Exception):
    """A stage did not end well; carries the outcome and where its log lies."""

    def __init__(self, outcome: Outcome, log: str = "", given_up: str = "") -> None:
        """given_up: why it is not tried again, where its kind alone does not say so."""
        super().__init__(outcome, log, given_up)
        self.outcome = outcome
        self.log = log
        self.given_up = given_up

    @property
    def exit_status(self) -> int:
        """The class of the failure as an exit status."""
        return self.outcome.exit_status

    def __str__(self) -> str:
        return self._with(self.outcome.message)

    def __repr__(self) -> str:
        """One short line: Prefect writes this into the logs and states of tasks, for people."""
        return self._with(brief(self.outcome.message))

    def _with(self, message: str) -> str:
        text = f"{self.outcome.name}: {self.outcome.how}"
        text += f": {message}" if message else ""
        return f"{text} ({self.given_up})" if self.given_up else text


def brief(text: str, most: int = BRIEF_CHARS) -> str:
    """On one line, and no longer than so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 4].rstrip() + " ..."
