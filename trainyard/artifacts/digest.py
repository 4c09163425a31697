"""Digests of contents: blake3, in hexadecimal. Pure functions of bytes and documents."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from blake3 import blake3

SHORT = 12
"""Digits that distinguish two digests for a reader."""

LARGE = 4 * 2**20
"""Bytes from which a separate thread is worth its start."""


def hasher() -> Any:
    """A running digest with `update(bytes)` and `hexdigest()`."""
    return blake3()


@contextmanager
def digesting(running: Any, data: memoryview) -> Iterator[None]:
    """Update a running digest while the body writes the same bytes, which takes about as long.

    Both release Python's lock."""
    if len(data) < LARGE:
        yield
        running.update(data)
        return
    thread = threading.Thread(target=running.update, args=(data,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Both:
    """A running digest that passes its bytes to another one too."""

    def __init__(self, running: Any, other: Any) -> None:
        self._running, self._other = running, other

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        with digesting(self._other, memoryview(data)):
            self._running.update(data)

    def hexdigest(self) -> str:
        """Of the first."""
        return str(self._running.hexdigest())


class FileDigests:
    """The digests of files, none of them empty, whose bytes pass by end to end."""

    def __init__(self, sizes: Iterable[int], together: Any = None) -> None:
        """together: another running digest, which gets the same bytes at the same time."""
        self.found: list[str] = []
        self._sizes, self._left = iter(sizes), 0
        self._running, self._together = hasher(), together

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        if self._together is None:
            self._update(view)
            return
        with digesting(self._together, view):
            self._update(view)

    def _update(self, data: memoryview) -> None:
        while data:
            self._left = self._left or next(self._sizes)
            part = data[: self._left]
            self._running.update(part)
            data, self._left = data[len(part) :], self._left - len(part)
            if not self._left:
                self.found.append(self._running.hexdigest())
                self._running = hasher()


def digest_bytes(data: bytes | memoryview) -> str:
    """The digest of bytes in memory."""
    return blake3(data).hexdigest()


def digest_document(document: Any) -> str:
    """The digest of a JSON-able document, independent of the order of its keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest_bytes(text.encode())


def digest_files(files: Iterable[tuple[str, int, str]]) -> str:
    """The digest of a set of files given as (relative name, size in bytes, digest)."""
    return digest_document(sorted([name, size, digest] for name, size, digest in files))
