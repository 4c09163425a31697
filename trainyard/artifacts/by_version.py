"""Remembers on this machine what was computed from a file, by its URL, size and version: a digest,
a check of every entry. A host reads a large file once, however many processes need the result."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from trainyard.artifacts import store
from trainyard.artifacts.digest import LARGE, digest_bytes
from trainyard.artifacts.replace_file import replace_file
from trainyard.artifacts.urls import is_local, local_path

log = logging.getLogger(__name__)

SETTLED_SECONDS = 2.0
"""A file younger than this may change again without a new modification time."""

DIGEST = "digest"
"""The result whose entries have no suffix in their names."""


def cache_folder() -> Path:
    """Folder of what a machine keeps between runs: TRAINYARD_CACHE, else the user's cache."""
    chosen = os.environ.get("TRAINYARD_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"


def digests_folder() -> Path:
    """Folder of what is remembered about files: TRAINYARD_DIGESTS, which machines and containers
    may share, else in the cache folder."""
    chosen = os.environ.get("TRAINYARD_DIGESTS")
    return Path(chosen) if chosen else cache_folder() / "digests"


def remembered(
    url: str, what: str, compute: Callable[[], object], size_bytes: int | None = None
) -> object:
    """The result of `compute`, which depends on nothing but the contents of the file at `url`.

    what: names the result, and changes with its definition. The result must be JSON-able. One
    process of this machine computes it for a large file, and the others wait. size_bytes: of what
    `compute` reads, if the file only names it by digest."""
    found = store.info(url)
    is_large = (found.size_bytes if size_bytes is None else size_bytes) >= LARGE
    if what != DIGEST and not is_large:
        return compute()  # sooner than it is looked up
    entry, absolute = _entry(url, what)
    state: list[object] = [absolute, found.size_bytes, found.version]
    cached = _read(entry, state, what) if found.version else None
    if cached is not None:
        return cached
    with one_at_a_time(entry.stem, is_large and bool(found.version)) as waited:
        cached = _read(entry, state, what) if waited else None
        if cached is not None:
            return cached
        result = compute()
        if found.version and _is_settled(url):
            _write(entry, state, what, result)
        return result


def remember(url: str, what: str, result: object) -> None:
    """Remember what others computed from the contents of the file at `url` in its present version,
    as if `remembered` had."""
    found = store.info(url)
    if found.version and _is_settled(url):
        entry, absolute = _entry(url, what)
        _write(entry, [absolute, found.size_bytes, found.version], what, result)


def _entry(url: str, what: str) -> tuple[Path, str]:
    """The file of an entry, and the URL by which it is found."""
    path = local_path(url)
    absolute = str(path.resolve()) if path is not None else url
    named = absolute if what == DIGEST else f"{absolute} {what}"
    return digests_folder() / f"{digest_bytes(named.encode())[:32]}.json", absolute


def _write(entry: Path, state: list[object], what: str, result: object) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        replace_file(entry, json.dumps({"state": state, what: result}).encode())
    except OSError as error:
        _warn_once(str(entry.parent), f"{type(error).__name__}: {error.strerror}")


def _read(entry: Path, state: list[object], what: str) -> object:
    try:
        cached = json.loads(entry.read_text())
        return cached[what] if cached["state"] == state else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@lru_cache(maxsize=8)
def _warn_once(folder: str, fault: str) -> None:
    log.warning(
        "%s: digests cannot be saved, so the next run reads the files again (%s); "
        "set TRAINYARD_DIGESTS to another folder",
        folder,
        fault,
    )


def _is_settled(url: str) -> bool:
    path = local_path(url)
    return not is_local(url) or (
        path is not None and time.time() - path.stat().st_mtime > SETTLED_SECONDS
    )


@contextmanager
def one_at_a_time(key: str, is_needed: bool = True) -> Iterator[bool]:
    """A lock for one process of this machine at a time; the kernel frees it when its holder dies.
    Yields whether it is held: without it every process does the work, with the same result."""
    path = cache_folder() / "locks" / f"{key}.lock"
    if not is_needed:
        yield False
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError:
        yield False
        return
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield True
        finally:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked since then holds it open
            with suppress(OSError):
                path.unlink()  # a process that waits on it continues, and finds the result
