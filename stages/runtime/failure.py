"""How a run ends, in words a person reads and in documents that survive a launcher.

Launchers between a stage and its caller change exit codes; `failure.json` and `outcome.json` in the
folder named by TRAINYARD_RUN_DIR say the same thing whatever happens to the code."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from trainyard.errors import (
    EXIT_DEFECT,
    CommunicationError,
    InfrastructureError,
    Stopped,
    TrainyardError,
    lack_of_memory,
)
from trainyard.logging import printable

RUN_DIR = "TRAINYARD_RUN_DIR"

OF_COMMUNICATION = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
"""Error classes of torch that mean that ranks have lost each other, by name: torch need not be
imported."""

STEP = "trainyard_step"
"""Attribute of an error: the last step that a training had finished when it met it."""
STEP_DIGITS = 20
"""Width of the number in the file in which a rank tells its parent how far it is."""


def exit_status(error: BaseException) -> int:
    """The exit status that an error ends a stage with."""
    if isinstance(error, TrainyardError | Stopped):
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    meaning = failure_class(error)
    if issubclass(meaning, OSError | InfrastructureError):
        return InfrastructureError.exit_status
    return EXIT_DEFECT


def failure_class(error: BaseException) -> type[BaseException]:
    """What an error is told as in failure.json: its own class, or one of ours where the system or
    torch have said that memory or another rank is gone."""
    if isinstance(error, TrainyardError):
        return type(error)
    if type(error).__name__ in OF_COMMUNICATION and lack_of_memory(error) is None:
        return CommunicationError
    return lack_of_memory(error) or type(error)


def add_step(error: BaseException, step: int | None) -> None:
    """Have failure.json say how far a training was; None, or 0, of one that finished no step."""
    if step:
        setattr(error, STEP, step)


def read_step(file: Path) -> int | None:
    """What a rank told its parent; None when it has told nothing."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def report_failure(stage: str, error: BaseException, debug: bool) -> int:
    """Say what went wrong, write failure.json, and return the exit status."""
    status = exit_status(error)
    kind = type(error).__name__
    log = logging.getLogger(f"stages.{stage}")
    message = str(error) or kind
    if debug:
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    if isinstance(error, Stopped | KeyboardInterrupt):
        log.warning("%s; nothing half-done was published", message)
    elif isinstance(error, TrainyardError):
        log.error("%s", message)
    else:
        place = _place(error)
        what = "defect of trainyard" if status == EXIT_DEFECT else "infrastructure"
        log.error(
            "%s: %s: %s: %s (%s); --debug shows the traceback", stage, what, kind, message, place
        )
    document = {
        "format_version": 1,
        "stage": stage,
        "class": failure_class(error).__name__,
        "message": message,
        "exit_status": status,
    }
    if (step := getattr(error, STEP, None)) is not None:
        document["step"] = step
    _write("failure.json", document)
    return status


def report_outcome(outcome: str, reason: str, manifest_url: str, output_digest: str) -> None:
    """Leave word of a run that ended well: "ran" with its reason, or "noop"."""
    _write(
        "outcome.json",
        {
            "format_version": 1,
            "outcome": outcome,
            "reason": reason,
            "manifest_url": manifest_url,
            "output_digest": output_digest,
        },
    )


def clear_reports() -> None:
    """Remove what an earlier attempt left in the run's folder."""
    folder = os.environ.get(RUN_DIR)
    if folder:
        for name in ("failure.json", "outcome.json"):
            Path(folder, name).unlink(missing_ok=True)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"


def _write(name: str, document: dict[str, Any]) -> None:
    folder = os.environ.get(RUN_DIR)
    if not folder:
        return
    path = Path(folder, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:  # of several ranks, the first to fail is the one that matters
            json.dump(document, file)
    except FileExistsError:
        pass
    except OSError as error:
        logging.getLogger(__name__).warning("could not write %s: %s", path, error)
