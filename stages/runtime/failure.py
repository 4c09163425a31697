"""Reports the end of a run: a message for people, and documents for the launcher's caller.

Launchers change exit codes, so `failure.json` and `outcome.json` in the folder TRAINYARD_RUN_DIR
repeat the outcome."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trainyard.errors import (
    EXIT_DEFECT,
    CommunicationError,
    InfrastructureError,
    Stopped,
    TrainyardError,
    lack_of_memory,
)
from trainyard.logging import printable, shortened

RUN_DIR = "TRAINYARD_RUN_DIR"

COMMUNICATION_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
"""torch's error classes for a lost connection between ranks, by name, so that torch need not be
imported."""

STEP = "trainyard_step"
"""Attribute of an error: the last training step finished before it."""
STEP_DIGITS = 20
"""Width of the number in the file in which a rank reports its step to its parent."""


def exit_status(error: BaseException) -> int:
    """The exit status of a stage that fails with this error."""
    if isinstance(error, TrainyardError | Stopped):
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    meaning = failure_class(error)
    if issubclass(meaning, OSError | InfrastructureError):
        return InfrastructureError.exit_status
    return EXIT_DEFECT


def failure_class(error: BaseException) -> type[BaseException]:
    """The class of an error in failure.json: its own, or one of ours for lack of memory or a lost
    rank reported by the system or torch."""
    if isinstance(error, TrainyardError):
        return type(error)
    if type(error).__name__ in COMMUNICATION_ERRORS and lack_of_memory(error) is None:
        return CommunicationError
    return lack_of_memory(error) or type(error)


def add_step(error: BaseException, step: int | None) -> None:
    """Record the last finished step for failure.json; None or 0 if there is none."""
    if step:
        setattr(error, STEP, step)


def read_step(file: Path) -> int | None:
    """The step that a rank reported to its parent, or None."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def report_failure(stage: str, error: BaseException, debug: bool, program: str = "") -> int:
    """Log the error, write failure.json, and return the exit status. program: the command, if it is
    not that of the stage."""
    status = exit_status(error)
    kind = type(error).__name__
    log = logging.getLogger(f"stages.{program or stage}")
    message = shortened(str(error) or kind)
    if debug:
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    if isinstance(error, Stopped | KeyboardInterrupt):
        kept = getattr(error, "saved", "") or "nothing incomplete was published"
        log.warning("%s; %s", message, kept)
    elif isinstance(error, TrainyardError):
        log.error("%s", message)
    else:
        cause = "defect of trainyard" if status == EXIT_DEFECT else "infrastructure"
        log.error(
            "%s: %s: %s: %s (%s); --debug shows the traceback",
            *(program or stage, cause, kind, message, _location(error)),
        )
    document = {
        "format_version": 1,
        "stage": stage,
        "class": failure_class(error).__name__,
        "message": printable(message),
        "exit_status": status,
    }
    if (step := getattr(error, STEP, None)) is not None:
        document["step"] = step
    _write("failure.json", document)
    return status


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a successful run ended."""

    outcome: Literal["ran", "noop"]
    reason: str
    """Why it ran; empty if it had nothing to do."""
    manifest_url: str
    output_digest: str


def report_outcome(found: RunOutcome) -> None:
    """Write outcome.json for a successful run."""
    _write("outcome.json", {"format_version": 1, **asdict(found)})


def report_outcomes(found: Sequence[RunOutcome]) -> None:
    """Write outcome.json for several runs in one process, all successful."""
    ran = [one for one in found if one.outcome == "ran"]
    reason = f"{len(ran)} of {len(found)} had work: {ran[0].reason}" if ran else ""
    together = RunOutcome("ran" if ran else "noop", reason, "", "")
    runs = [asdict(one) for one in found]
    _write("outcome.json", {"format_version": 1, **asdict(together), "runs": runs})


def clear_reports() -> None:
    """Remove the reports of an earlier attempt from the run's folder."""
    folder = os.environ.get(RUN_DIR)
    if folder:
        for name in ("failure.json", "outcome.json"):
            Path(folder, name).unlink(missing_ok=True)


def _location(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"


def _write(name: str, document: dict[str, Any]) -> None:
    folder = os.environ.get(RUN_DIR)
    if not folder:
        return
    path = Path(folder, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:  # of several ranks, the first failure counts
            json.dump(document, file)
    except FileExistsError:
        pass
    except OSError as error:
        logging.getLogger(__name__).warning("could not write %s: %s", path, error)
