"""A file of a store that hands out byte ranges, as a file that can be sought in."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from trainyard.artifacts.backends.base import Backend
from trainyard.artifacts.urls import basename
from trainyard.errors import ArtifactError

BLOCK_BYTES = 8 << 20
"""Of one request, at most; and what is read ahead."""


def open_ranged(backend: Backend, url: str, size: int, version: str) -> BinaryIO:
    """Open a file of known size in a known version for reading.

    Reading raises ArtifactError for a file that is cut short or changes meanwhile."""
    return io.BufferedReader(_RangedFile(backend, url, size, version), BLOCK_BYTES)


class _RangedFile(io.RawIOBase):
    """Every read is a request."""

    def __init__(self, backend: Backend, url: str, size: int, version: str) -> None:
        super().__init__()
        self.name = basename(url)
        self._backend, self._url, self._size, self._version = backend, url, size, version
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readall(self) -> bytes:
        # As inherited it asks for 8 KiB at a time.
        return b"".join(iter(lambda: self.read(BLOCK_BYTES) or b"", b""))

    def readinto(self, buffer: Any) -> int:
        # What is asked for at once may be a whole checkpoint, which would be in memory twice.
        view = memoryview(buffer).cast("B")[:BLOCK_BYTES]
        end = min(self._size, self._at + len(view))
        if end <= self._at:
            return 0
        data = self._backend.read_range(self._url, self._at, end, self._version)
        if len(data) < end - self._at:
            raise ArtifactError(
                f"{self._url}: ends at byte {self._at + len(data)}; it was cut short"
            )
        view[: len(data)] = data
        self._at = end
        return len(data)
