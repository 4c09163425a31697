"""Readers of the tokens of a .bin: mapped, from the file piece by piece, or remote in ranges.

All return the same tokens, and work in any number of threads and after a fork."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainyard.artifacts import inputs, store
from trainyard.artifacts.digest import LARGE, digest_bytes
from trainyard.artifacts.manifest import DAMAGED, check_digest
from trainyard.corpus.layout import Tokens
from trainyard.corpus.pairs import SUMS
from trainyard.corpus.remote import CacheOptions, RangedFile, fetch_whole
from trainyard.corpus.sums import Sums
from trainyard.errors import ArtifactError, ConfigError

Reader = Literal["auto", "mmap", "file", "ranged", "fetch"]
"""auto: mmap for local files, ranged for remote ones. mmap: mapped into memory. file: read from the
file, for file systems that do not map well. ranged: in ranges through a cache on this node.
fetch: copied to that cache whole, then mapped."""

LOCAL_READERS = ("mmap", "file")


class TokenReader(Protocol):
    """The tokens of a .bin, end to end."""

    flat: Tokens | None
    """All tokens as one array, if one map holds them."""
    is_mapped: bool
    """Whether a read only accesses memory."""

    def read(self, start: int, end: int) -> Tokens:
        """Tokens `start` up to `end` of the file."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce tokens that will be read soon; returns at once."""


def open_reader(
    kind: Reader, url: str, info: store.FileInfo, dtype: np.dtype[Any], options: CacheOptions
) -> TokenReader:
    """A reader of the .bin at `url`."""
    path = store.local_path(url)
    if path is None and kind in LOCAL_READERS:
        raise ConfigError(f"{url}: the reader {kind!r} is for local files; use 'ranged' or 'fetch'")
    if kind == "fetch" and path is None:
        return MappedReader(fetch_whole(url, options, lambda copy: map_file(copy, dtype)))
    if path is None:
        return RangedReader(RangedFile(url, options, info), dtype)
    if kind in ("auto", "mmap", "fetch"):
        return MappedReader(map_file(path, dtype))
    if kind == "file":
        return FileReader(path, dtype)
    return RangedReader(RangedFile(url, options, info), dtype)


def open_checked(
    kind: Reader,
    prefix_url: str,
    info: store.FileInfo,
    dtype: np.dtype[Any],
    options: CacheOptions,
    manifests: inputs.Manifests,
) -> TokenReader:
    """A reader of the .bin of a pair, which compares its blocks with the digests in its .sums if a
    manifest lists both. info: of the .bin."""
    bin_url, sums_url = prefix_url + ".bin", prefix_url + SUMS
    reader, record = open_reader(kind, bin_url, info, dtype, options), manifests.record(sums_url)
    if record is None or manifests.record(bin_url) is None:
        return reader
    sums = Sums(map_listed(sums_url, record, options), sums_url, info.size_bytes)
    return CheckedReader(reader, sums, bin_url, dtype)


def map_file(path: Path, dtype: npt.DTypeLike = np.uint8) -> Tokens:
    """A local file as a read-only array backed by the page cache."""
    if path.stat().st_size == 0:  # mmap refuses an empty file
        return np.empty(0, dtype)
    # A plain array: slicing one costs a third of slicing a memmap.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def map_listed(url: str, record: store.FileRecord | None, options: CacheOptions) -> Tokens:
    """The bytes of a whole file, mapped; a remote one is copied to this node once.

    Raises ArtifactError if it is not the file of its record in a manifest (None: it has none)."""
    path = store.local_path(url)
    if path is None:
        return fetch_whole(url, options, map_file, record)
    raw = map_file(inputs.fetch(url, path.parent))
    if record is not None:
        # A large file is read once in this version, not by every process of every run.
        is_large = record.size_bytes >= LARGE
        digest = inputs.raw_digest(url) if is_large else digest_bytes(raw.data)
        check_digest(url, record, digest)
    return raw


class MappedReader:
    """A view of the page cache: no copy, no system call."""

    is_mapped = True

    def __init__(self, flat: Tokens) -> None:
        self.flat: Tokens | None = flat
        self._all = flat

    def read(self, start: int, end: int) -> Tokens:
        """A view."""
        return self._all[start:end]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: the kernel reads ahead."""


class FileReader:
    """One system call for each piece; the file stays open."""

    flat: Tokens | None = None
    is_mapped = False

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, end: int) -> Tokens:
        """A copy, writable."""
        tokens = np.empty(max(0, end - start), self._dtype)
        view = tokens.view(np.uint8).data
        at = start * self._dtype.itemsize
        while len(view):
            count = os.preadv(self._file, [view], at)
            if not count:
                raise ArtifactError(
                    f"{self._path}: was truncated to {at} bytes after it was opened; run again"
                )
            view, at = view[count:], at + count
        return tokens

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Tell the kernel, which reads them in the background."""
        size = self._dtype.itemsize
        if hasattr(os, "posix_fadvise"):
            for start, end in ranges:
                length = (end - start) * size
                os.posix_fadvise(self._file, start * size, length, os.POSIX_FADV_WILLNEED)


class RangedReader:
    """Ranges of a remote file, through blocks kept on this node."""

    flat: Tokens | None = None
    is_mapped = False

    def __init__(self, file: RangedFile, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._dtype = dtype

    def read(self, start: int, end: int) -> Tokens:
        """A copy, read-only."""
        size = self._dtype.itemsize
        return np.frombuffer(self._file.read(start * size, max(start, end) * size), self._dtype)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch their blocks in the background."""
        size = self._dtype.itemsize
        self._file.prefetch([(start * size, end * size) for start, end in ranges])


class CheckedReader:
    """Compares each block of a .bin with its digest before a token of it is read, once in a
    process. Raises ArtifactError for a block that differs."""

    def __init__(self, reader: TokenReader, sums: Sums, url: str, dtype: np.dtype[Any]) -> None:
        self.flat, self.is_mapped = reader.flat, reader.is_mapped
        self._reader, self._sums, self._url = reader, sums, url
        self._per_block = sums.block_bytes // dtype.itemsize
        self._num_tokens = sums.bin_bytes // dtype.itemsize
        self._is_checked = bytearray(len(sums))

    def check(self, start: int, end: int) -> None:
        """Compare the blocks of tokens `start` up to `end`, for a caller that takes them from
        `flat`."""
        if start >= end:
            return
        first, last = start // self._per_block, (end - 1) // self._per_block
        if not all(self._is_checked[first : last + 1]):
            for block in range(first, min(last + 1, len(self._sums))):
                if not self._is_checked[block]:
                    self._check_block(block)

    def _check_block(self, block: int) -> None:
        begin = block * self._per_block
        end = min(begin + self._per_block, self._num_tokens)
        data = self._reader.read(begin, end).view(np.uint8).data
        if not self._sums.matches(block, data):
            low = block * self._sums.block_bytes
            raise ArtifactError(
                f"{self._url}: bytes {low} to {low + len(data)} are not those that its {SUMS} "
                f"lists; {DAMAGED}"
            )
        self._is_checked[block] = True

    def read(self, start: int, end: int) -> Tokens:
        """As the reader that it checks."""
        self.check(start, end)
        return self._reader.read(start, end)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As the reader that it checks."""
        self._reader.prefetch(ranges)
