"""Safetensors files as bytes, without torch: header, ranges, digest. As tensors: `file`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from trainyard.artifacts import store
from trainyard.artifacts.backends.readahead import in_order
from trainyard.artifacts.digest import hasher
from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.blocks import BlockCache, DigestBlock, Digests, FileBlocks
from trainyard.checkpoint.safetensors.header import (
    PREFIX_BYTES,
    Extent,
    header_length,
    parse_header,
)
from trainyard.errors import ArtifactError

READ_BYTES = 8 << 20
"""Maximum bytes of one read."""

FIRST_BYTES = 64 << 10
"""First read of a remote file, which usually contains the header."""


class ShardFile(Closing):
    """A safetensors file opened for reading by range, from any number of threads.

    Raises ArtifactError for a truncated or hostile file, and for one that changes while open."""

    def __init__(self, url: str, expected_bytes: int | None = None) -> None:
        """expected_bytes: size of the file in its manifest."""
        self.url = url
        self._path = store.local_path(url)
        found = store.info(url)
        self.size_bytes, self._version = found.size_bytes, found.version
        if expected_bytes not in (None, self.size_bytes):
            raise ArtifactError(
                f"{url}: {self.size_bytes} bytes, manifest.json says {expected_bytes}; the file is "
                "truncated or was replaced"
            )
        self._stamp = _stamp_of(self._path.stat()) if self._path is not None else None
        self._expected: FileBlocks | None = None
        self.extents, self.metadata = self._header()

    def expect(self, digests: Digests, cache: BlockCache) -> None:
        """Compare with these digests what is read from now on. cache: for blocks of which a reader
        needs a part."""
        self._expected, self._cache = FileBlocks(self.extents, digests), cache

    @property
    def is_local(self) -> bool:
        """Whether reads are system calls, not requests to a store."""
        return self._path is not None

    def _header(self) -> tuple[dict[str, Extent], dict[str, str]]:
        size = self.size_bytes
        first = bytearray(min(size, PREFIX_BYTES if self.is_local else FIRST_BYTES))
        self.read_into(0, memoryview(first))
        end = PREFIX_BYTES + header_length(bytes(first[:PREFIX_BYTES]), size, self.url)
        rest = bytearray(max(0, end - len(first)))
        self.read_into(len(first), memoryview(rest))
        return parse_header(bytes((first + rest)[PREFIX_BYTES:end]), size, self.url)

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `begin` on; ArtifactError, which names the tensor, unless
        they are those expected."""
        if self._expected is None:
            self._read(begin, memory)
            return
        end = begin + len(memory)
        blocks = list(self._expected.within(begin, end))
        cut = [block for block in (*blocks[:1], *blocks[1:][-1:]) if not _lies(block, begin, end)]
        whole = [block for block in blocks if block not in cut]
        if whole:
            self._read(whole[0].begin, memory[whole[0].begin - begin : whole[-1].end - begin])
        for block in whole:
            self._check_block(block, memory[block.begin - begin : block.end - begin])
        for block in cut:
            data = self._cache.get(self.url, block, self._read_block)
            first, last = max(begin, block.begin), min(end, block.end)
            memory[first - begin : last - begin] = data[first - block.begin : last - block.begin]

    def _read_block(self, block: DigestBlock) -> bytearray:
        data = bytearray(block.end - block.begin)
        self._read(block.begin, memoryview(data))
        self._check_block(block, data)
        return data

    def _check_block(self, block: DigestBlock, data: memoryview | bytearray) -> None:
        if not block.holds(data):
            raise ArtifactError(
                f"{self.url}: tensor {block.key!r} is damaged: bytes {block.begin} to {block.end} "
                "do not have the digest in index.json; restore the file from a copy, or use "
                "another step"
            )

    def _read(self, begin: int, memory: memoryview) -> None:
        if self._path is None:
            memory[:] = store.read_range(self.url, begin, begin + len(memory), self._version)
            return
        # Opened for each read: a step may have more files than a process may have open.
        # O_NONBLOCK: opening a pipe in place of a file would block.
        with store.operation("read", self.url):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                self._check_stamp(os.fstat(descriptor))
                while memory:
                    count = os.preadv(descriptor, [memory], begin)
                    if not count:
                        raise ArtifactError(f"{self.url}: ends at byte {begin}; it is truncated")
                    memory, begin = memory[count:], begin + count
            finally:
                os.close(descriptor)

    def digest(self) -> str:
        """Digest of all its bytes, which are read."""
        running = hasher()
        for block in self._blocks():
            running.update(block)
        return str(running.hexdigest())

    def _blocks(self) -> Iterator[bytes | memoryview]:
        if not self.is_local:
            source = store.SourceFile(self.url, self.size_bytes, self._version)
            yield from store.read_files([source])
            return
        memory = memoryview(bytearray(min(READ_BYTES, self.size_bytes)))
        for begin in range(0, self.size_bytes, READ_BYTES):
            block = memory[: min(READ_BYTES, self.size_bytes - begin)]
            self._read(begin, block)
            yield block

    def check_unchanged(self) -> None:
        """Raise ArtifactError if a local file was written or replaced since it was opened; for a
        remote one every read checks that."""
        if self._path is not None:
            self._check_stamp(self._path.stat() if self._path.exists() else None)

    def _check_stamp(self, found: os.stat_result | None) -> None:
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise ArtifactError(f"{self.url}: not a file")
        if found is None or _stamp_of(found) != self._stamp:
            raise ArtifactError(f"{self.url}: changed while it was being read")

    def close(self) -> None:
        """Nothing to do: no file is open between reads."""


def _lies(block: DigestBlock, begin: int, end: int) -> bool:
    return begin <= block.begin and block.end <= end


def _stamp_of(found: os.stat_result) -> tuple[int, int, int]:
    """A stamp that changes with the contents, and not when another link to the file is made."""
    return found.st_ino, found.st_size, found.st_mtime_ns


# --- threads ----------------------------------------------------------------------------------


J = TypeVar("J")
R = TypeVar("R")

LOCAL_THREADS = max(1, min(4, os.cpu_count() or 1))
"""More do not speed up a disk, and copies from the page cache are bound by memory."""

REMOTE_THREADS = 8
"""Concurrent requests to an object store."""


def in_threads(work: Callable[[J], R], jobs: Iterable[J], num_threads: int) -> Iterator[R]:
    """Results of `work` for every job, in order; jobs are started for two per thread ahead."""
    return in_order(work, jobs, num_threads, 2 * num_threads)


def num_threads(files: Iterable[ShardFile]) -> int:
    """Number of threads that speeds up reading the files."""
    return LOCAL_THREADS if all(file.is_local for file in files) else REMOTE_THREADS
