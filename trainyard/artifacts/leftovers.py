"""Leftovers of killed runs: all files below a URL with their ages, and incomplete uploads.

Ages are by the store's own clock, so that no two clocks are compared."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.backends.base import Backend
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.urls import is_local, join, local_path
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file below a URL."""

    name: str
    """Relative to the URL."""
    size_bytes: int
    age_seconds: float
    """Since the last write."""


@dataclass(frozen=True, slots=True)
class Upload:
    """The parts of an object that was never completed: not an object, but stored and paid for."""

    url: str
    upload_id: str
    age_seconds: float
    size_bytes: int


def entries(url: str) -> list[ListedFile]:
    """Every file below a folder, also temporary ones, sorted by name.

    Raises ConfigError for a store that trainyard only reads."""
    with store.operation("list", url) as behind:
        path = local_path(url)
        if path is not None:
            return sorted(_local_entries(path), key=lambda entry: entry.name)
        return sorted(_s3_entries(_s3(behind, url), url), key=lambda entry: entry.name)


def _s3(backend: Backend, url: str) -> S3Backend:
    if not isinstance(backend, S3Backend):
        raise ConfigError(f"{url}: cannot remove files there: trainyard writes to s3:// only")
    return backend


def _local_entries(root: Path) -> Iterator[ListedFile]:
    if not root.is_dir():
        return
    now = _file_system_now(root)
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            with suppress(FileNotFoundError):  # removed since; a link counts as itself
                stat = path.lstat()
                relative = path.relative_to(root).as_posix()
                yield ListedFile(relative, stat.st_size, max(0.0, now - stat.st_mtime))


def _file_system_now(folder: Path) -> float:
    """The modification time that the file system gives a new file; our clock if that fails."""
    probe = folder / f".tmp-probe-{uuid.uuid4().hex[:12]}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def _s3_entries(backend: S3Backend, url: str) -> Iterator[ListedFile]:
    for name, age, found in _listed(backend, url, "list_objects_v2", "Contents", "LastModified"):
        if not found["Key"].endswith("/"):  # a folder marker of some tools
            yield ListedFile(name, int(found["Size"]), age)


def _listed(
    backend: S3Backend, url: str, operation: str, items: str, since: str
) -> Iterator[tuple[str, float, Any]]:
    """A listing below a folder: relative path, age in seconds, and the store's entry.

    items, since: fields of the reply that hold the list, and of an entry that holds its time."""
    folder = backend.folder(url)
    root = folder["Prefix"]
    for reply in backend.pages(operation, **folder):
        now = _date(reply)
        for found in reply.get(items, ()):
            if found["Key"].startswith(root):  # not every store supports Prefix for uploads
                age = max(0.0, now - found[since].timestamp())
                yield found["Key"][len(root) :], age, found


def _date(reply: Any) -> float:
    """When the store answered, by its clock."""
    date = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else time.time()


# --- uploads ----------------------------------------------------------------------------------


def uploads(url: str) -> list[Upload]:
    """Incomplete uploads below a folder, of live or killed runs. Empty on a file system."""
    if is_local(url):
        return []
    with store.operation("list", url) as behind:
        return list(_uploads(_s3(behind, url), url))


def _uploads(backend: S3Backend, url: str) -> Iterator[Upload]:
    for name, age, found in _listed(backend, url, "list_multipart_uploads", "Uploads", "Initiated"):
        size = _size_of_parts(backend, backend.folder(url)["Bucket"], found)
        yield Upload(join(url, name), found["UploadId"], age, size)


def _size_of_parts(backend: S3Backend, bucket: str, upload: Any) -> int:
    asked = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    total = 0
    with suppress(FileNotFoundError):  # completed or aborted since
        for reply in backend.pages("list_parts", **asked):
            total += sum(int(part["Size"]) for part in reply.get("Parts", ()))
    return total


def abort(upload: Upload) -> None:
    """Remove the parts of an upload, if they still exist."""
    with store.operation("delete", upload.url) as behind, suppress(FileNotFoundError):
        assert isinstance(behind, S3Backend)
        behind.call(
            "abort_multipart_upload", **behind.address(upload.url), UploadId=upload.upload_id
        )
