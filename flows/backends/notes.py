"""What blocks keep in run folders for a program that follows after this one: whose submission a
folder is of, why its job is being ended, and what else its block has to know again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.backends.outcome import Kind
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, InfrastructureError

SUBMITTED = "submitted.json"
"""File of a run folder: what was submitted from it."""

ENDING = "ending.json"
"""File of a run folder whose job we end: why, and whether it knows. Who finds it after this program
was killed sees that end through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """That a program of ours ends a job."""

    kind: Kind
    """Why."""
    is_told: bool
    """The job was sent its signal to save and leave."""


def read_note(path: Path, name: str) -> dict[str, Any] | None:
    """What was noted of the job of this name; None when nothing was.

    Raises ConfigError when the folder is another job's."""
    document = noted(path)
    if document is not None and document["name"] != name:
        raise ConfigError(
            f"run folder {path.parent} is of job {document['name']}, not of {name}: each "
            f"submission needs a folder of its own"
        )
    return document


def noted(path: Path) -> dict[str, Any] | None:
    """What was noted there, of whichever job; None when nothing was."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return document


def write_note(path: Path, document: dict[str, Any]) -> None:
    """Note it; whole or not at all, whenever this program is killed."""
    being_written = path.with_name(f"{path.name}.tmp")
    being_written.write_text(json.dumps(document) + "\n")
    being_written.replace(path)


def read_ending(folder: Path) -> Ending | None:
    """Why a program of ours ends, or has ended, the job of a run folder; None: none does."""
    try:
        document: dict[str, Any] = json.loads((folder / ENDING).read_text())
    except FileNotFoundError:
        return None
    return Ending(kind=Kind(document["kind"]), is_told=document["is_told"])


def is_being_cancelled(spec: LaunchSpec) -> bool:
    """True when a program that was killed meanwhile had begun to cancel the job of a run folder."""
    with run_folder_io(Path(spec.run_directory)):
        ending = read_ending(Path(spec.run_directory))
    return ending is not None and ending.kind is Kind.STOPPED


def write_ending(folder: Path, ending: Ending) -> None:
    """Note it, before anything is done to the job."""
    write_note(folder / ENDING, {"kind": ending.kind, "is_told": ending.is_told})


FOLLOWED = "its job is left as it is, and is followed when this is tried again"
NOT_BEGUN = "no job was begun"


@contextmanager
def run_folder_io(folder: Path, job: str = FOLLOWED) -> Iterator[None]:
    """Tell what the file system of a run folder refuses, such as a full disk or a stale handle of
    NFS, as what it is: InfrastructureError. Nothing was done to the job; `job` says what of it.

    A file that is not there is an answer, and for whoever asks."""
    try:
        yield
    except OSError as error:
        raise InfrastructureError(f"run folder {folder} cannot be used ({error}); {job}") from error
