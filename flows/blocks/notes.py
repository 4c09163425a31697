"""What blocks keep in run folders for a program that follows after this one: whose submission a
folder is of, and what else its block has to know again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainyard.errors import ConfigError

SUBMITTED = "submitted.json"
"""File of a run folder: what was submitted from it."""


def read_note(path: Path, name: str) -> dict[str, Any] | None:
    """What was noted of the job of this name; None when nothing was.

    Raises ConfigError when the folder is another job's."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if document["name"] != name:
        raise ConfigError(
            f"run folder {path.parent} is of job {document['name']}, not of {name}: each "
            f"submission needs a folder of its own"
        )
    return document


def write_note(path: Path, document: dict[str, Any]) -> None:
    """Note it; whole or not at all, whenever this program is killed."""
    being_written = path.with_name(f"{path.name}.tmp")
    being_written.write_text(json.dumps(document) + "\n")
    being_written.replace(path)
