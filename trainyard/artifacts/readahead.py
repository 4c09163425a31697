"""Byte ranges of files in order, read ahead by a few threads: what hides the latency of a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from trainyard.artifacts import store

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


def whole(sources: Sequence[store.SourceFile]) -> list[ByteRange]:
    """All bytes of files."""
    return [ByteRange(s.url, 0, s.size_bytes, s.version) for s in sources]


def read_whole(url: str) -> Iterator[bytes]:
    """All bytes of a file, a block at a time.

    Raises ArtifactError for a file that changes meanwhile."""
    found = store.info(url)
    return read_ahead(blocks([ByteRange(url, 0, found.size_bytes, found.version)]))


def download(url: str, target: Path) -> None:
    """Copy a file to this machine; it appears there when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=target.parent, delete=False) as copy:
        try:
            for block in read_whole(url):
                copy.write(block)
        except BaseException:
            Path(copy.name).unlink()
            raise
    Path(copy.name).replace(target)


def read_ahead(ranges: Iterable[ByteRange], num_threads: int = NUM_THREADS) -> Iterator[bytes]:
    """The bytes of each range, in order; as many ranges as threads are in memory.

    Raises ArtifactError for a file that is no longer in its version, or ends too soon."""
    pending: deque[Future[bytes]] = deque()
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead")
    try:
        for part in ranges:
            pending.append(executor.submit(store.read_range, *part))
            if len(pending) == num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
