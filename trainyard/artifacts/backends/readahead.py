"""Byte ranges of files, read in order and ahead of the caller, which hides a store's latency."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, TypeVar

from trainyard.artifacts.backends.base import Backend, Read, SourceFile
from trainyard.artifacts.urls import basename
from trainyard.errors import ArtifactError

J = TypeVar("J")
R = TypeVar("R")

BLOCK_BYTES = 4 << 20
"""Of one range, at most, when whole files are read."""

REQUEST_BYTES = 8 << 20
"""Of one request for a file opened by `open_ranged`, at most; also its read-ahead."""

NUM_THREADS = 6


class ByteRange(NamedTuple):
    """Some bytes of a file in a known version."""

    url: str
    start: int
    end: int
    version: str | None = None


def blocks(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    """The same bytes, in ranges of at most a block."""
    for part in ranges:
        for start in range(part.start, part.end, BLOCK_BYTES):
            yield part._replace(start=start, end=min(start + BLOCK_BYTES, part.end))


def whole(sources: Sequence[SourceFile]) -> list[ByteRange]:
    """All bytes of files."""
    return [ByteRange(s.url, 0, s.size_bytes, s.version) for s in sources]


def in_order(
    work: Callable[[J], R], jobs: Iterable[J], num_threads: int, in_flight: int
) -> Iterator[R]:
    """Results of `work` for every job, in order; at most `in_flight` jobs are started ahead.

    Raises what a job raised when its result is due, after the started jobs have ended."""
    pending: deque[Future[R]] = deque()
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix="in-order")
    try:
        for job in jobs:
            pending.append(executor.submit(work, job))
            if len(pending) >= in_flight:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def read_in_order(ranges: Iterable[ByteRange], read: Read) -> Iterator[bytes]:
    """The bytes of each range, in order; at most NUM_THREADS ranges are in memory.

    Raises ArtifactError for a file that has another version or is too short."""
    return in_order(lambda part: read(*part), ranges, NUM_THREADS, NUM_THREADS)


def open_ranged(backend: Backend, url: str, size: int, version: str) -> BinaryIO:
    """Open a file of known size and version for reading, by byte ranges.

    Reading raises ArtifactError for a file that is truncated or changes during the read."""
    return io.BufferedReader(_RangedFile(backend, url, size, version), REQUEST_BYTES)


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
        # The inherited method asks for 8 KiB at a time.
        return b"".join(iter(lambda: self.read(REQUEST_BYTES) or b"", b""))

    def readinto(self, buffer: Any) -> int:
        # A caller may ask for a whole checkpoint, which would then be in memory twice.
        view = memoryview(buffer).cast("B")[:REQUEST_BYTES]
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
