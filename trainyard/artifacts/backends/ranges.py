"""Byte ranges of files, and reading them in order, ahead of whoever takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from trainyard.artifacts.backends.base import Read, SourceFile

BLOCK_BYTES = 4 << 20
NUM_THREADS = 6


class ByteRange(NamedTuple):
    """Some bytes of a file in a known version."""

    url: str
    start: int
    end: int
    version: str | None = None


def blocks(ranges: Iterable[ByteRange], block_bytes: int = BLOCK_BYTES) -> Iterator[ByteRange]:
    """The same bytes, in ranges of at most a block."""
    for part in ranges:
        for start in range(part.start, part.end, block_bytes):
            yield part._replace(start=start, end=min(start + block_bytes, part.end))


def whole(sources: Sequence[SourceFile]) -> list[ByteRange]:
    """All bytes of files."""
    return [ByteRange(s.url, 0, s.size_bytes, s.version) for s in sources]


def read_in_order(
    ranges: Iterable[ByteRange], read: Read, num_threads: int = NUM_THREADS
) -> Iterator[bytes]:
    """The bytes of each range, in order; as many ranges as threads are in memory.

    Raises ArtifactError for a file that is no longer in its version, or ends too soon."""
    pending: deque[Future[bytes]] = deque()
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead")
    try:
        for part in ranges:
            pending.append(executor.submit(read, *part))
            if len(pending) == num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
