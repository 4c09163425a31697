"""A bounded folder of blocks of remote files, shared by the processes of a node.

    FOLDER/blocks/KEY/NUMBER    one block of a file; KEY is the digest of its URL, version and size
    FOLDER/blocks/KEY/whole     all of it
    FOLDER/blocks/lock          a lock; contains the total bytes of all blocks

A block gets its name when it is complete, and its contents follow from its name, so no process
waits for another. Before a new block is written, the least recently used ones are removed. Only
files under FOLDER/blocks are ever removed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TOUCH_SECONDS = 30.0
"""Precision of the time at which a block was last used."""

STALE_SECONDS = 3600.0
"""A temporary file that has not changed for this long is from a killed process."""

TEMPORARY = ".tmp-"

ROOM_LEFT = 0.9
"""Share of the limit that stays filled after blocks were removed."""


@dataclass(frozen=True, slots=True)
class BlockFolder:
    """A folder of blocks, with a limit of bytes."""

    folder: Path
    max_bytes: int

    @property
    def root(self) -> Path:
        """The subfolder that belongs to the cache."""
        return self.folder / "blocks"

    def path(self, key: str, name: str) -> Path:
        """The path of a block, which may be missing."""
        return self.root / key / name

    def read(self, key: str, name: str, start: int, end: int) -> bytes | None:
        """Some bytes of a block; None if it is missing, or was removed."""
        try:
            descriptor = os.open(self.path(key, name), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            touch(descriptor)
            data = os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)
        return data if len(data) == end - start else None

    def put(self, key: str, name: str, size: int, write: Callable[[BinaryIO], object]) -> Path:
        """Make room, let `write` fill the file, publish it; returns its path.

        Raises OSError for a read-only folder or a full disk."""
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.path(key, name)
        temporary = target.with_name(f"{TEMPORARY}{os.getpid()}-{time.monotonic_ns()}-{name}")
        try:
            self._reserve(temporary, size)
            with temporary.open("r+b") as file:
                write(file)
            with self._locked():  # or else another process may miss the file under both names
                temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def _reserve(self, temporary: Path, size: int) -> None:
        """Make room for a file and begin it at its full length, so that it counts at once."""
        with self._locked() as lock:
            known = os.pread(lock, 20, 0)
            used = int(known) if known.isdigit() else self.max_bytes
            if used + size > self.max_bytes:
                used = self._evict(max(0, int(self.max_bytes * ROOM_LEFT) - size))
            temporary.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                file.truncate(size)
            os.pwrite(lock, b"%020d" % (used + size), 0)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel releases it if the process dies
            yield descriptor
        finally:
            # Unlocked, not only closed: a process forked since then has the descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _evict(self, keep_bytes: int) -> int:
        """Remove the least recently used blocks until `keep_bytes` are left; returns the rest."""
        found = sorted(self._files())
        used = sum(size for _, size, _ in found)
        for _, size, path in found:
            if used <= keep_bytes:
                break
            if os.path.basename(path).startswith(TEMPORARY):
                continue  # being written
            Path(path).unlink(missing_ok=True)
            used -= size
            with suppress(OSError):  # it still contains other blocks
                os.rmdir(os.path.dirname(path))
        return used

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(last use, size, path) of every block; removes temporary files of killed processes."""
        stale = time.time() - STALE_SECONDS
        for folder, _, names in os.walk(self.root):
            for name in names if folder != str(self.root) else ():
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    stat = os.stat(path)
                    if name.startswith(TEMPORARY) and stat.st_mtime < stale:
                        os.unlink(path)
                    else:
                        yield stat.st_mtime, stat.st_size, path


def touch(descriptor: int) -> None:
    """Record that a block was used."""
    if time.time() - os.fstat(descriptor).st_mtime > TOUCH_SECONDS:
        with suppress(OSError):  # of another user: it keeps its place in the queue
            os.utime(descriptor)
