"""What the run folder of a container's job tells of it: its name, and how it ended."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flows.backends.container.client import ContainerState
from flows.backends.notes import write_note

NOTE = "container.json"
"""File of a run folder: the name of its container, and how that ended once it has."""


def end_noted(noted: dict[str, Any] | None) -> ContainerState | None:
    """How the container of a note ended; None when nobody has noted that."""
    return (
        ContainerState(**noted["end"]) if noted is not None and noted["end"] is not None else None
    )


def note_container(folder: Path, name: str, end: ContainerState | None) -> None:
    """Note that a container of this name was started, or how it ended."""
    told = None if end is None else dataclasses.asdict(end)
    write_note(folder / NOTE, {"name": name, "end": told})
