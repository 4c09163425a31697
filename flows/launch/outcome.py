"""What the end of a job means: done, or whose fault it was and whether trying again can help.

`failure.json`, which a stage leaves in its run folder, is believed before the exit status:
launchers between a stage and its caller change exit codes."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainyard.errors import EXIT_DEFECT, ConfigError, DataError, InfrastructureError


class Kind(StrEnum):
    """How a job ended."""

    DONE = "done"
    DATA = "fault in the data"
    CONFIG = "wrong option"
    INFRASTRUCTURE = "infrastructure"
    DEFECT = "defect of trainyard"
    STOPPED = "stopped"


EXIT_STATUS = {
    Kind.DONE: 0,
    Kind.DATA: DataError.exit_status,
    Kind.CONFIG: ConfigError.exit_status,
    Kind.INFRASTRUCTURE: InfrastructureError.exit_status,
    Kind.DEFECT: EXIT_DEFECT,
    Kind.STOPPED: 128 + signal.SIGTERM,
}

KINDS = {status: kind for kind, status in EXIT_STATUS.items()} | {128 + signal.SIGINT: Kind.STOPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one attempt."""

    name: str
    kind: Kind
    exit_status: int
    """The contract's: 0, 1, 2, 3, 70, 130 or 143, whatever number the process ended with."""
    message: str = ""
    error: str = ""
    """Class of the error, when the stage said it."""
    step: int | None = None
    """Training step at which it happened, when the stage said it."""

    @property
    def may_succeed_later(self) -> bool:
        """True when the same command is worth trying again."""
        return self.kind is Kind.INFRASTRUCTURE


def classify(name: str, returncode: int, failure: dict[str, Any] | None) -> Outcome:
    """The outcome that an exit code (negative: killed by that signal) and a failure.json mean."""
    if returncode == 0:
        return Outcome(name=name, kind=Kind.DONE, exit_status=0)
    status, message = _by_code(returncode)
    if failure is None:
        return Outcome(
            name=name, kind=KINDS.get(status, Kind.DEFECT), exit_status=status, message=message
        )
    said = failure.get("exit_status")
    status = said if said in KINDS and said != 0 else status
    step = failure.get("step")
    return Outcome(
        name=name,
        kind=KINDS.get(status, Kind.DEFECT),
        exit_status=status,
        message=str(failure.get("message") or message),
        error=str(failure.get("class") or ""),
        step=step if isinstance(step, int) else None,
    )


def _by_code(code: int) -> tuple[int, str]:
    """Exit status of the contract and words for a code that nothing else explains."""
    number = -code if code < 0 else code - 128 if 128 < code <= 192 else 0
    if number in (signal.SIGTERM, signal.SIGINT):
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


class StageError(Exception):
    """A stage did not end well; carries the outcome and where its log lies."""

    def __init__(self, outcome: Outcome, log: str = "") -> None:
        super().__init__(outcome, log)
        self.outcome = outcome
        self.log = log

    @property
    def exit_status(self) -> int:
        """The class of the failure as an exit status."""
        return self.outcome.exit_status

    def __str__(self) -> str:
        step = "" if self.outcome.step is None else f" at step {self.outcome.step}"
        return f"{self.outcome.name}: {self.outcome.kind}{step}: {self.outcome.message}"
