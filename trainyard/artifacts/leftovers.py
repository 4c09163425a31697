"""What runs leave that were killed, as a store holds it: everything below a place with its age, and
uploads that nobody completed.

Ages are by the clock of the store itself, so that no two clocks are compared."""

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
class Entry:
    """A file below a place."""

    name: str
    """Relative to the place."""
    size_bytes: int
    age_seconds: float
    """Since it was last written."""


@dataclass(frozen=True, slots=True)
class Upload:
    """The parts of an object that was never completed: no object, and yet paid for."""

    url: str
    upload_id: str
    age_seconds: float
    size_bytes: int


def entries(url: str) -> list[Entry]:
    """Every file below a folder, temporary ones too, in the order of their names; empty for none.

    Raises ConfigError for a kind of store that is only read from."""
    with store.operation("list", url) as behind:
        path = local_path(url)
        if path is not None:
            return sorted(_local_entries(path), key=lambda entry: entry.name)
        return sorted(_s3_entries(_s3(behind, url), url), key=lambda entry: entry.name)


def _s3(backend: Backend, url: str) -> S3Backend:
    if not isinstance(backend, S3Backend):
        raise ConfigError(f"{url}: nothing is removed there: trainyard writes to s3:// only")
    return backend


def _local_entries(root: Path) -> Iterator[Entry]:
    if not root.is_dir():
        return
    now = _file_system_now(root)
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            with suppress(FileNotFoundError):  # gone since; a link counts as itself
                stat = path.lstat()
                relative = path.relative_to(root).as_posix()
                yield Entry(relative, stat.st_size, max(0.0, now - stat.st_mtime))


def _file_system_now(folder: Path) -> float:
    """The time as the file system's own machine gives it to a new file; ours where we may not
    write."""
    probe = folder / f".tmp-probe-{uuid.uuid4().hex[:12]}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def _s3_entries(backend: S3Backend, url: str) -> Iterator[Entry]:
    for name, age, found in _listed(backend, url, "list_objects_v2", "Contents", "LastModified"):
        if not found["Key"].endswith("/"):  # what stands for a folder in some tools
            yield Entry(name, int(found["Size"]), age)


def _listed(
    backend: S3Backend, url: str, operation: str, items: str, since: str
) -> Iterator[tuple[str, float, Any]]:
    """What a store lists below a folder: path from there, seconds since, and all it tells.

    items, since: the store's names of the list in an answer, and of the time of one in it."""
    folder = backend.folder(url)
    root = folder["Prefix"]
    for reply in backend.pages(operation, **folder):
        now = _date(reply)
        for found in reply.get(items, ()):
            if found["Key"].startswith(root):  # not every store knows Prefix of uploads
                age = max(0.0, now - found[since].timestamp())
                yield found["Key"][len(root) :], age, found


def _date(reply: Any) -> float:
    """When the store answered, by its clock."""
    told = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(told).timestamp() if told else time.time()


# --- uploads ----------------------------------------------------------------------------------


def uploads(url: str) -> list[Upload]:
    """The uploads below a folder that are not completed: begun by runs that live, or that were
    killed. None on a file system."""
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
    with suppress(FileNotFoundError):  # completed or given up since
        for reply in backend.pages("list_parts", **asked):
            total += sum(int(part["Size"]) for part in reply.get("Parts", ()))
    return total


def abort(upload: Upload) -> None:
    """Remove the parts of an upload, if they are there still."""
    with store.operation("delete", upload.url) as behind, suppress(FileNotFoundError):
        assert isinstance(behind, S3Backend)
        behind.call("abort_multipart_upload", **behind.place(upload.url), UploadId=upload.upload_id)
