"""The records of a run folder, by which a restarted flow finds its job again.

A submission is found by its key: a digest of flow run and task, and the number of the submission. A
flow that was killed and started again computes the same key and follows the job instead of
submitting another. Prefect's own run count does not work: it grows with every start of the flow."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.backends.outcome import Kind
from flows.backends.spec import LaunchSpec
from trainyard import json_text
from trainyard.artifacts.replace_file import replace_file
from trainyard.errors import ConfigError, InfrastructureError

LOG = "log.txt"
"""All that the job wrote to stdout and stderr."""

HEARTBEAT = "heartbeat"
"""File that a job may touch to show that it is alive, besides its log."""

SUBMITTED = "submitted.json"
"""What was submitted from this folder."""

STOP_RECORD = "ending.json"
"""Why we stop the job of this folder. If we are killed first, the next program finishes that."""

DIGITS = 16
"""Hexadecimal digits of the SHA-256 in a key; no two submissions of a yard collide."""

FOLLOWED = "its job keeps running, and a retry follows it"
NOT_BEGUN = "no job was started"


def log_name(share: int | None) -> str:
    """File with the output of the job, or of one of its shares."""
    return LOG if share is None else f"log-{share:05d}.txt"


def share_folder(share: int | None) -> str:
    """Folder, relative to the run folder, of a share's own reports; empty for a whole job."""
    return "" if share is None else f"share-{share}"


def job_key(flow_run: str, task: str, submission: int) -> str:
    """The key of the n-th submission, from 1, that a flow run makes for one of its tasks."""
    if submission < 1:
        raise ValueError(f"submissions count from 1, got {submission}")
    text = "\0".join((flow_run, task))
    return f"{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}-{submission}"


def submission_of(key: str) -> int:
    """The submission number in a key."""
    return int(key.rpartition("-")[2])


def make_run_folder(folder: Path) -> None:
    """Create a run folder for options, log and scripts; an existing one is kept.

    It is its owner's alone, but for the group, or everyone, if the umask lets them write: as on a
    yard of a group, or where pods run as another user. Parents have the site's umask."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & stat.S_IWGRP:
        mode &= ~stat.S_IRWXG
    if not mode & stat.S_IWOTH:
        mode &= ~stat.S_IRWXO
    folder.chmod(mode)


# --- records --------------------------------------------------------------------------------------


def read_record(path: Path, name: str | None = None) -> dict[str, Any] | None:
    """A recorded document; None if there is none.

    name: of the job that it must belong to; ConfigError if the folder is another job's."""
    try:
        document: dict[str, Any] = json_text.loads(path.read_text())
        if not isinstance(document, dict) or (name is not None and "name" not in document):
            raise ValueError("it is not a table, or has no name")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a record of trainyard ({error}); remove its folder, and run again"
        ) from error
    if name is not None and document["name"] != name:
        raise ConfigError(
            f"run folder {path.parent} belongs to job {document['name']}, not to {name}: each "
            f"submission needs a folder of its own"
        )
    return document


def write_record(path: Path, document: dict[str, Any]) -> None:
    """Record a document atomically, also if this program is killed meanwhile."""
    replace_file(path, f"{json.dumps(document)}\n".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord:
    """That a program of ours stops a job."""

    kind: Kind
    """Why."""
    was_signalled: bool
    """Whether the job was sent its signal to save and exit."""


def read_stop_record(folder: Path) -> StopRecord | None:
    """Why a program of ours stops, or stopped, the job of a run folder; None if none does."""
    document = read_record(folder / STOP_RECORD)
    if document is None:
        return None
    return StopRecord(kind=Kind(document["kind"]), was_signalled=document["is_told"])


def write_stop_record(folder: Path, stop: StopRecord) -> None:
    """Record why we stop a job, before we do anything to it."""
    write_record(folder / STOP_RECORD, {"kind": stop.kind, "is_told": stop.was_signalled})


def is_being_cancelled(spec: LaunchSpec) -> bool:
    """Whether a program, killed since, began to cancel the job of a run folder."""
    with run_folder_io(Path(spec.run_directory)):
        stop = read_stop_record(Path(spec.run_directory))
    return stop is not None and stop.kind is Kind.STOPPED


@contextmanager
def run_folder_io(folder: Path, job: str = FOLLOWED) -> Iterator[None]:
    """Raise InfrastructureError for an OSError, such as a full disk or a stale NFS handle.

    job: for the message, the state of the job, which the error does not change."""
    try:
        yield
    except OSError as error:
        raise InfrastructureError(f"run folder {folder} cannot be used ({error}); {job}") from error
