"""What a store can do of what runs rest on, found out by doing it: in a folder of its own, which is
removed after.

For whoever brings a store up (`deploy/dev/s3check.py`) or asks whether one can be used
(`flows.doctor`). The kinds of store that a stage writes to are known here: file systems and S3."""

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
"""Of no object: what a conditional replacement with it must be refused for."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing that was tried."""

    name: str
    is_conditional: bool
    """Part of what one-writer and one-manifest rest on."""
    fault: str
    """What is wrong, in words; empty when it works."""


def examine(folder_url: str) -> Iterator[Trial]:
    """Try everything that stages ask of a store, one by one.

    Raises what the store raises when it cannot be written to at all."""
    place = join(folder_url, f".tmp-probe-{uuid.uuid4().hex[:12]}")
    try:
        store.write_bytes(join(place, "first"), b"0123456789")
        for name, is_conditional, attempt in TRIALS:
            try:
                fault = attempt(place)
            except TrainyardError as error:
                fault = str(error)
            yield Trial(name, is_conditional, fault)
        if not is_local(folder_url):
            yield Trial("uploads in parts", False, _uploads(place))
    finally:
        store.delete_tree(place)


def _read_back(place: str) -> str:
    data = store.read_bytes(join(place, "first"))
    return "" if data == b"0123456789" else f"read {data!r} where b'0123456789' was written"


def _read_range(place: str) -> str:
    data = store.read_range(join(place, "first"), 2, 5)
    return "" if data == b"234" else f"bytes 2 to 5 came as {data!r}, not as b'234'"


def _list(place: str) -> str:
    store.write_bytes(join(place, "a", "b"), b"1")
    found = store.list_files(place)
    return "" if found == {"a/b": 1, "first": 10} else f"a listing right after writing was {found}"


def _create_once(place: str) -> str:
    url = join(place, "once")
    if conditional.put_if_absent(url, b"1") is None:
        return "a new object was refused as one that is there"
    if conditional.put_if_absent(url, b"2") is not None:
        return "an object that is there was overwritten in spite of If-None-Match"
    return "" if store.read_bytes(url) == b"1" else "a refused write changed the object"


def _replace_version(place: str) -> str:
    url = join(place, "replaced")
    first = conditional.put_if_absent(url, b"1")
    if first is None:
        return "a new object was refused as one that is there"
    second = conditional.replace_if_match(url, b"2", first)
    if second is None:
        return "the version that was read was not accepted by If-Match"
    for stale in (first, NO_VERSION):
        if conditional.replace_if_match(url, b"3", stale) is not None:
            return "a version that is gone was replaced in spite of If-Match"
    return "" if store.read_bytes(url) == b"2" else "a refused write changed the object"


def _race(place: str) -> str:
    """Several writers of one name at once: exactly one may win."""
    with ThreadPoolExecutor(WRITERS) as threads:
        for number in range(ROUNDS):
            url = join(place, f"race-{number}")
            texts = [f"writer {n}".encode() for n in range(WRITERS)]
            won = list(threads.map(partial(_creates, url), texts))
            if sum(won) != 1:
                return f"{sum(won)} of {WRITERS} writers at once were told that they came first"
    return ""


def _creates(url: str, text: bytes) -> bool:
    return conditional.put_if_absent(url, text) is not None


def _uploads(place: str) -> str:
    """Two parts become an object, and an upload that is given up leaves none."""
    backend = S3Backend("s3")
    try:
        upload = MultipartUpload(backend, join(place, "parts"))
        upload.upload(1, b"1" * MIN_PART)
        upload.upload(2, b"2")
        upload.complete(MIN_PART + 1)
        MultipartUpload(backend, join(place, "given-up")).abort()
        found = store.read_range(join(place, "parts"), MIN_PART - 1, MIN_PART + 1)
    except (TrainyardError, FileNotFoundError, PermissionError) as error:
        return str(error)
    if found != b"12":
        return f"the seam of two parts reads {found!r}"
    return "an upload that was given up is there" if store.exists(join(place, "given-up")) else ""


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
    """Connect to whatever holds a URL, within seconds; returns what answered, for people.

    Raises ArtifactError for a folder that is not there and cannot be made, InfrastructureError for
    a machine that does not answer. The store's own client tries for a minute before it says so."""
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
            f"{endpoint} does not answer ({error.strerror or error}); is the store up, and is "
            f"AWS_ENDPOINT_URL right?"
        ) from error
    return endpoint


def seconds_ahead(url: str, timeout_seconds: float) -> float:
    """How far the clock behind a URL is ahead of ours, in seconds, as well as can be told: of a
    file system by the time that it gives a new file, of a store by the date of an answer."""
    path = local_path(url)
    if path is not None:
        return _file_seconds_ahead(_nearest(path))
    before = time.time()
    date = _headers(s3_client.endpoint(), timeout_seconds).get("Date")
    after = time.time()
    if date is None:
        raise InfrastructureError(f"{s3_client.endpoint()}: its answers bear no date")
    told = parsedate_to_datetime(date).timestamp()
    # A date has whole seconds, and was written while we waited.
    return 0.0 if before - 1 <= told <= after else told - (before if told < before else after)


def is_open_to_all(url: str, timeout_seconds: float) -> bool:
    """Whether a store lists a bucket for somebody who shows no credentials; S3 only."""
    bucket = S3Backend("s3").place(url)["Bucket"]
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
    except urllib.error.HTTPError as error:  # refused, which has a date as well
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
    """The path, or the folder above it that is there."""
    found = next((p for p in (path.absolute(), *path.absolute().parents) if p.exists()), None)
    if found is None:
        raise ArtifactError(f"{path}: no folder above it is there either")
    return found if found.is_dir() else found.parent


def _file_seconds_ahead(folder: Path) -> float:
    probe = folder / f".tmp-probe-{uuid.uuid4().hex[:12]}"
    before = time.time()
    try:
        probe.touch()
        told = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    after = time.time()
    # The kernel's clock for files ticks some milliseconds behind.
    return 0.0 if before - 0.1 <= told <= after else told - (before if told < before else after)
