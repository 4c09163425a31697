"""Reads remote files in ranges, through blocks that are cached on this node.

Blocks of a few megabytes are fetched when they are needed, or earlier: the next ones of a file that
is read in order, and those that `prefetch` names. A file is identified by URL, version and size, so
a block always has the contents of that version."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainyard.artifacts import store
from trainyard.artifacts.by_version import cache_folder
from trainyard.artifacts.digest import SHORT, digest_bytes, hasher
from trainyard.artifacts.manifest import check_digest
from trainyard.corpus.blocks import BlockFolder
from trainyard.corpus.layout import Tokens
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

_warning = threading.Lock()

NUM_FETCHERS = 4
MAX_WAITING = 16
"""Blocks fetched ahead at once; further ones are fetched when they are read."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How remote token files are kept on a node."""

    folder: Path = field(default_factory=lambda: cache_folder() / "tokens")
    """Shared by all processes; a folder in /dev/shm takes memory."""
    max_bytes: int = 16 << 30
    """Limit of all files together."""
    block_bytes: int = 4 << 20
    blocks_ahead: int = 2
    """Blocks to fetch ahead when a file is read in order."""

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.max_bytes < self.block_bytes:
            raise ConfigError(
                f"a cache of {self.max_bytes} bytes is too small for a block of {self.block_bytes}"
            )

    @property
    def blocks(self) -> BlockFolder:
        """The folder of blocks."""
        return BlockFolder(self.folder, self.max_bytes)


class RangedFile:
    """One version of a remote file, for any number of threads.

    It pickles as its URL, and also works in a forked process."""

    def __init__(self, url: str, options: CacheOptions, info: store.FileInfo | None = None) -> None:
        self.url = url
        self.options = options
        self.info = store.info(url) if info is None else info
        self._key = _key(url, self.info, options.block_bytes)
        self._folder = options.blocks
        self._ours: _Process | None = None

    def __reduce__(self) -> tuple[Callable[..., RangedFile], tuple[Any, ...]]:
        return RangedFile, (self.url, self.options, self.info)

    def __len__(self) -> int:
        return self.info.size_bytes

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start` up to `end`.

        Raises ArtifactError if the file has changed since, or ends before `end`."""
        if not 0 <= start <= end <= len(self):
            raise IndexError(f"bytes {start} to {end} of {self.url}, which has {len(self)}")
        size = self.options.block_bytes
        first, last = start // size, -(-end // size)
        if last > first:
            self._expect(first, last)
        pieces = []
        for number in range(first, last):
            base = number * size
            low, high = max(start - base, 0), min(end - base, size)
            data = self._folder.read(self._key, str(number), low, high)
            pieces.append(self._fetched(number, low, high) if data is None else data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to fetch what will be read; returns at once."""
        size = self.options.block_bytes
        wanted = {n for start, end in ranges for n in range(start // size, -(-end // size))}
        for number in sorted(wanted):
            self._begin(number)

    # --- what belongs to one process ----------------------------------------------------------

    @property
    def _process(self) -> _Process:
        # A fork cannot use the threads and locks of its parent.
        if self._ours is None or self._ours.pid != os.getpid():
            self._ours = _Process(os.getpid())
        return self._ours

    def _expect(self, first: int, last: int) -> None:
        """Blocks `first` up to `last` are about to be read: begin to fetch all but the first, and
        also the next ones if the file is read in order."""
        process = self._process
        in_order = last > process.last + 1 and first - process.last in (0, 1)
        process.last = last - 1
        end = last + self.options.blocks_ahead if in_order else last
        for number in range(first + 1, min(end, -(-len(self) // self.options.block_bytes))):
            self._begin(number)

    def _begin(self, number: int) -> None:
        process = self._process
        with process.lock:
            waiting = len(process.coming) >= MAX_WAITING or number in process.coming
            if waiting or os.path.exists(self._folder.path(self._key, str(number))):
                return
            coming = process.coming[number] = Future()
        _fetchers(os.getpid()).submit(self._fetch, process, number, coming)

    def _fetched(self, number: int, low: int, high: int) -> bytes:
        """Bytes of a block from the store; threads that need the same one wait for the first."""
        process = self._process
        with process.lock:
            coming = process.coming.get(number)
            is_first = coming is None
            if coming is None:
                # Another thread may have fetched it since the caller looked.
                data = self._folder.read(self._key, str(number), low, high)
                if data is not None:
                    return data
                coming = process.coming[number] = Future()
        if is_first:
            self._fetch(process, number, coming)
        return coming.result()[low:high]

    def _fetch(self, process: _Process, number: int, coming: Future[bytes]) -> None:
        """Fetch a block. Completes `coming` in every case, as another thread may wait for it."""
        try:
            start = number * self.options.block_bytes
            end = min(start + self.options.block_bytes, len(self))
            data = store.read_range(self.url, start, end, self.info.version)
            self._keep(number, data)
            coming.set_result(data)
        except BaseException as error:
            coming.set_exception(error)
        finally:
            with process.lock:
                del process.coming[number]

    def _keep(self, number: int, data: bytes) -> None:
        try:
            self._folder.put(self._key, str(number), len(data), lambda file: file.write(data))
        except OSError as error:
            _warn_once(str(self.options.folder), f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _Process:
    pid: int
    last: int = -1
    """The block read last."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    coming: dict[int, Future[bytes]] = field(default_factory=dict)


@lru_cache(maxsize=1)
def _fetchers(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="fetch-block")


_warned: set[str] = set()


def _warn_once(folder: str, fault: str) -> None:
    with _warning:
        if folder in _warned:
            return
        _warned.add(folder)
    log.warning("%s: cannot cache blocks, so each is fetched when it is read: %s", folder, fault)


def _key(url: str, info: store.FileInfo, block_bytes: int) -> str:
    text = f"{url}\n{info.version}\n{info.size_bytes}\n{block_bytes}"
    return digest_bytes(text.encode())[: 2 * SHORT]


# --- arrays that are not in memory ------------------------------------------------------------


class LazyArray:
    """Numbers in a file: has `len`, single numbers, and slices as arrays, which suffices to read
    them in order. read: returns the bytes between two offsets."""

    def __init__(self, read: Callable[[int, int], Any], start: int, count: int, dtype: str) -> None:
        self._bytes = read
        self._start = start
        self._count = count
        self.dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice | int) -> Any:
        if isinstance(where, slice):
            first, last, step = where.indices(self._count)
            assert step == 1, "only read in order"
            return self._read(first, max(first, last))
        return self._read(where % self._count, where % self._count + 1)[0]

    def _read(self, first: int, last: int) -> Tokens:
        size = self.dtype.itemsize
        data = self._bytes(self._start + first * size, self._start + last * size)
        return np.frombuffer(data, self.dtype)


# --- whole files ------------------------------------------------------------------------------


def fetch_whole(
    url: str,
    options: CacheOptions,
    open_file: Callable[[Path], Tokens],
    record: store.FileRecord | None = None,
) -> Tokens:
    """A remote file, copied to the node once and opened there; it stays open if the copy is
    removed. record: what a manifest lists; the copy is compared with it as it is made, and has a
    name of its own.

    Raises ConfigError for a file that is larger than the cache, ArtifactError for one that is not
    the file of its record."""
    info = store.info(url)
    name = "whole" if record is None else f"whole-{digest_bytes(record.digest.encode())[:SHORT]}"
    write = partial(_download, store.SourceFile(url, info.size_bytes, info.version), record)
    key = _key(url, info, 0)
    return kept_whole(url, key, info.size_bytes, options, write, open_file, name)


def kept_whole(
    url: str,
    key: str,
    size_bytes: int,
    options: CacheOptions,
    write: Callable[[BinaryIO], object],
    open_file: Callable[[Path], Tokens],
    name: str = "whole",
) -> Tokens:
    """A file of the cache, opened; `write` makes it if it is missing. It stays open if it is
    removed there. url: what it is a copy of, for messages. key: follows from its contents.

    Raises ConfigError for a file that is larger than the cache."""
    if size_bytes > options.max_bytes:
        raise ConfigError(
            f"{url} is {size_bytes} bytes, more than the {options.max_bytes} of the cache in "
            f"{options.folder}, to which it must be copied; raise --object-storage-cache-size-mb "
            f"({options.max_bytes >> 20}) above {size_bytes >> 20}"
        )
    path = options.blocks.path(key, name)
    for _ in range(3):
        try:
            found = open_file(path)
            os.utime(path)
        except FileNotFoundError:  # not made yet, or removed since
            options.blocks.put(path.parent.name, path.name, size_bytes, write)
        else:
            return found
    raise ConfigError(
        f"the cache in {options.folder}, {options.max_bytes} bytes, is too small for the files "
        f"that are read at once: {url} was removed before it could be opened; enlarge it"
    )


def _download(source: store.SourceFile, record: store.FileRecord | None, file: BinaryIO) -> None:
    digest = hasher()
    for block in store.read_files([source]):
        digest.update(block)
        file.write(block)
    if record is not None:
        check_digest(source.url, record, digest.hexdigest())
