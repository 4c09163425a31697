"""Checks of a store: tries every operation that runs need, in a temporary folder.

Used to set up a store (`deploy/dev/s3check.py`) and by `flows.doctor`. Covers the stores that a
stage writes to: file systems and S3."""

from __future__ import annotations

import os
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

from trainyard.artifacts import conditional, store
from trainyard.artifacts.backends import s3_client
from trainyard.artifacts.backends.multipart import MIN_PART, MultipartUpload
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.urls import is_local, join, local_path
from trainyard.errors import ArtifactError, InfrastructureError, TrainyardError

WRITERS = 8
ROUNDS = 5

NO_VERSION = '"00000000000000000000000000000000"'
"""The version of no object: a conditional replacement with it must be refused."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one check."""

    name: str
    is_conditional: bool
    """One writer and one manifest per output depend on it."""
    fault: str
    """What is wrong; empty if it works."""


def probe(folder_url: str) -> Iterator[Trial]:
    """Try every operation that stages use, one by one.

    Raises the store's error if it cannot be written to at all."""
    folder = join(folder_url, f".tmp-probe-{uuid.uuid4().hex[:12]}")
    try:
        store.write_bytes(join(folder, "first"), b"0123456789")
        for name, is_conditional, attempt in TRIALS:
            try:
                fault = attempt(folder)
            except TrainyardError as error:
                fault = str(error)
            yield Trial(name, is_conditional, fault)
        if not is_local(folder_url):
            yield Trial("uploads in parts", False, _uploads(folder))
    finally:
        store.delete_tree(folder)


def _read_back(folder: str) -> str:
    data = store.read_bytes(join(folder, "first"))
    return "" if data == b"0123456789" else f"read {data!r} where b'0123456789' was written"


def _read_range(folder: str) -> str:
    data = store.read_range(join(folder, "first"), 2, 5)
    return "" if data == b"234" else f"bytes 2 to 5 came as {data!r}, not as b'234'"


def _list(folder: str) -> str:
    store.write_bytes(join(folder, "a", "b"), b"1")
    found = store.list_files(folder)
    return "" if found == {"a/b": 1, "first": 10} else f"a listing right after writing was {found}"


def _create_once(folder: str) -> str:
    url = join(folder, "once")
    if conditional.put_if_absent(url, b"1") is None:
        return "a new object was refused as one that exists"
    if conditional.put_if_absent(url, b"2") is not None:
        return "an existing object was overwritten in spite of If-None-Match"
    return "" if store.read_bytes(url) == b"1" else "a refused write changed the object"


def _replace_version(folder: str) -> str:
    url = join(folder, "replaced")
    first = conditional.put_if_absent(url, b"1")
    if first is None:
        return "a new object was refused as one that exists"
    second = conditional.replace_if_match(url, b"2", first)
    if second is None:
        return "the version that was read was not accepted by If-Match"
    for stale in (first, NO_VERSION):
        if conditional.replace_if_match(url, b"3", stale) is not None:
            return "a version that no longer exists was replaced in spite of If-Match"
    return "" if store.read_bytes(url) == b"2" else "a refused write changed the object"


def _race(folder: str) -> str:
    """Several writers of one name at once: exactly one may win."""
    with ThreadPoolExecutor(WRITERS) as threads:
        for number in range(ROUNDS):
            url = join(folder, f"race-{number}")
            texts = [f"writer {n}".encode() for n in range(WRITERS)]
            won = list(threads.map(partial(_creates, url), texts))
            if sum(won) != 1:
                return f"{sum(won)} of {WRITERS} concurrent writers succeeded, not one"
    return ""


def _creates(url: str, text: bytes) -> bool:
    return conditional.put_if_absent(url, text) is not None


def _uploads(folder: str) -> str:
    """Two parts become an object, and an aborted upload leaves none."""
    backend = S3Backend("s3")
    try:
        upload = MultipartUpload(backend, join(folder, "parts"))
        upload.upload(1, b"1" * MIN_PART)
        upload.upload(2, b"2")
        upload.complete(MIN_PART + 1)
        MultipartUpload(backend, join(folder, "aborted")).abort()
        found = store.read_range(join(folder, "parts"), MIN_PART - 1, MIN_PART + 1)
    except (TrainyardError, FileNotFoundError, PermissionError) as error:
        return str(error)
    if found != b"12":
        return f"the bytes where two parts meet are {found!r}"
    return "an aborted upload left an object" if store.exists(join(folder, "aborted")) else ""


TRIALS: tuple[tuple[str, bool, Callable[[str], str]], ...] = (
    ("read after write", False, _read_back),
    ("read a range", False, _read_range),
    ("list after write", False, _list),
    ("create only once", True, _create_once),
    ("replace only what was read", True, _replace_version),
    ("one winner of a race", True, _race),
)


# --- without credentials ----------------------------------------------------------------------


def check_reachable(url: str, timeout_seconds: float) -> str:
    """Connect to the store of a URL within seconds; returns what answered, for a message.

    Raises ArtifactError for a missing folder that cannot be made, InfrastructureError for a machine
    that does not answer. The store's own client would retry for a minute."""
    path = local_path(url)
    if path is not None:
        return f"file system of {_nearest(path)}"
    endpoint = s3_client.endpoint()
    parts = urllib.parse.urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if urllib.request.getproxies().get(parts.scheme) and not urllib.request.proxy_bypass(host):
        return f"{endpoint}, through a proxy"
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except OSError as error:
        raise InfrastructureError(
            f"{endpoint} does not answer ({error.strerror or error}); check that the store runs "
            f"and that AWS_ENDPOINT_URL is right"
        ) from error
    return endpoint


def seconds_ahead(url: str, timeout_seconds: float) -> float:
    """How far the clock of a store is ahead of ours, in seconds, within the precision of the time
    of a new file (file system) or of the date of a reply (object store)."""
    path = local_path(url)
    if path is not None:
        return _file_seconds_ahead(_nearest(path))
    before = time.time()
    date = _headers(s3_client.endpoint(), timeout_seconds).get("Date")
    after = time.time()
    if date is None:
        raise InfrastructureError(f"{s3_client.endpoint()}: its replies have no date")
    # A date has whole seconds, and was written while we waited.
    return _seconds_outside(parsedate_to_datetime(date).timestamp(), before, after, 1.0)


def is_open_to_all(url: str, timeout_seconds: float) -> bool:
    """Whether a store lists a bucket without credentials; S3 only."""
    bucket = S3Backend("s3").address(url)["Bucket"]
    listing = f"{s3_client.endpoint().rstrip('/')}/{bucket}?list-type=2&max-keys=1"
    try:
        with _open(listing, timeout_seconds) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False


def _headers(url: str, timeout_seconds: float) -> dict[str, str]:
    try:
        with _open(url, timeout_seconds) as reply:
            return dict(reply.headers)
    except urllib.error.HTTPError as error:  # a refusal has a date too
        with error:
            return dict(error.headers)


def _open(url: str, timeout_seconds: float) -> Any:
    context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
    try:
        return urllib.request.urlopen(url, timeout=timeout_seconds, context=context)
    except urllib.error.HTTPError:
        raise
    except OSError as error:
        raise InfrastructureError(f"{url} does not answer: {error}") from error


def _nearest(path: Path) -> Path:
    """The path, or the nearest existing folder above it."""
    found = next((p for p in (path.absolute(), *path.absolute().parents) if p.exists()), None)
    if found is None:
        raise ArtifactError(f"{path}: no folder above it exists either")
    return found if found.is_dir() else found.parent


def _file_seconds_ahead(folder: Path) -> float:
    probe = folder / f".tmp-probe-{uuid.uuid4().hex[:12]}"
    before = time.time()
    try:
        probe.touch()
        written = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    after = time.time()
    # The kernel's clock for files is some milliseconds behind.
    return _seconds_outside(written, before, after, 0.1)


def _seconds_outside(time: float, before: float, after: float, slack: float) -> float:
    """How far a time is outside the interval in which it was measured; 0 within `slack` before."""
    if before - slack <= time <= after:
        return 0.0
    return time - (before if time < before else after)
