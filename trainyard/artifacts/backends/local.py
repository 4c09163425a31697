"""Files on this machine or on a shared file system.

A file appears under its name only when it is complete: it is written as `.tmp-*` in the same
folder, synced, renamed."""

# ruff: noqa: D102 (`base` documents these methods)

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainyard.artifacts import process
from trainyard.artifacts.backends.base import Read, SourceFile, Writer
from trainyard.artifacts.backends.fast_copy import Fill, append_files, append_filled, begin_sync
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.error_text import NO_FILE
from trainyard.artifacts.urls import is_local, local_path
from trainyard.errors import ArtifactError

TEMPORARY = ".tmp-"
BEGUN_BYTES = 1 << 20
"""So much more of a file begins to go to the disk while the rest is made."""

LEADS_NOWHERE = (errno.ENOENT, errno.ELOOP)
"""Errors for a broken link, or for a file that was removed since it was listed."""

NO_FILE_THERE = (*LEADS_NOWHERE, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors for a name that no file has."""


def _path(url: str) -> Path:
    path = local_path(url)
    assert path is not None, url
    return path


def _version(found: os.stat_result) -> str:
    # A program that changes a file in place can reset its modification time, but not its ctime.
    return f"{found.st_mtime_ns}-{found.st_ctime_ns}-{found.st_ino}"


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Skip a broken link, and a file that was removed since it was listed."""
    try:
        yield
    except OSError as error:
        if error.errno not in LEADS_NOWHERE:
            raise


def is_file(path: str | Path) -> bool:
    """Whether there is a file; several times as fast as pathlib's."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in NO_FILE_THERE:
            return False
        raise
    except ValueError:  # no file can have this name
        return False


def _open_at_once(path: str | Path, flags: int) -> int:
    """Open without waiting: a pipe in place of a file would block until something writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


class LocalBackend:
    """A file system."""

    def open_input(self, url: str) -> BinaryIO:
        file = open(_path(url), "rb", opener=_open_at_once)  # noqa: SIM115  # the caller closes it
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ArtifactError(f"{url}: {NO_FILE}")
        return file

    def read_range(self, url: str, start: int, end: int, version: str | None) -> bytes:
        descriptor = _open_at_once(_path(url), os.O_RDONLY)
        try:
            if version is not None and _version(os.fstat(descriptor)) != version:
                raise ArtifactError(f"{url}: changed while it was being read")
            pieces = []
            while start < end and (piece := os.pread(descriptor, end - start, start)):
                pieces.append(piece)
                start += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(descriptor)

    def open_output(self, url: str) -> LocalWriter:
        return LocalWriter(_path(url))

    def size_and_version(self, url: str) -> tuple[int, str]:
        path = _path(url)
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            kind = IsADirectoryError if path.is_dir() else FileNotFoundError
            raise kind(f"{path} is no file")
        return found.st_size, _version(found)

    def is_file(self, url: str) -> bool:
        return is_file(_path(url))

    def list_files(self, url: str) -> dict[str, int]:
        root = str(_path(url))
        found = {}
        for folder, folders, names in os.walk(root, onerror=_raise_unless_gone):
            folders.sort()
            below = f"{folder[len(root) :].strip('/')}/".lstrip("/")
            for name in names:  # of which there may be a million, so no pathlib
                with _unless_gone():
                    found[below + name] = os.stat(os.path.join(folder, name)).st_size
        return dict(sorted(found.items()))

    def list_folder(self, url: str) -> dict[str, tuple[int, str]]:
        found = {}
        with suppress(FileNotFoundError), os.scandir(_path(url)) as entries:
            for entry in entries:
                with _unless_gone():
                    if entry.is_file():
                        status = entry.stat()
                        found[entry.name] = (status.st_size, _version(status))
        return dict(sorted(found.items()))

    def list_subfolders(self, url: str) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(_path(url)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
        return []

    def glob(self, url: str) -> list[str]:
        return sorted(p for p in glob.glob(str(_path(url)), recursive=True) if os.path.isfile(p))

    def delete(self, url: str) -> None:
        _path(url).unlink(missing_ok=True)

    def delete_tree(self, url: str) -> None:
        shutil.rmtree(_path(url), ignore_errors=True)

    def move_tree(self, source: str, target: str) -> None:
        _path(target).parent.mkdir(parents=True, exist_ok=True)
        os.rename(_path(source), _path(target))

    def read_document(self, url: str) -> bytes:
        return self.read_version(url)[0]

    def read_version(self, url: str) -> tuple[bytes, str]:
        with self.open_input(url) as file:
            data = file.read()
        return data, digest_bytes(data)

    def put_if_absent(self, url: str, data: bytes) -> str | None:
        path = _path(url)
        temporary = _write_temporary(path, data)
        try:
            os.link(temporary, path)  # the one exclusive, atomic "create with contents" of POSIX
        except FileExistsError:
            return None
        finally:
            temporary.unlink()
        _sync_folder(path.parent)
        return digest_bytes(data)

    def replace_if_match(self, url: str, data: bytes, version: str) -> str | None:
        path = _path(url)
        with _locked(path.parent):
            try:
                current = digest_bytes(path.read_bytes())
            except FileNotFoundError:
                return None
            if current != version:
                return None
            os.replace(_write_temporary(path, data), path)
            _sync_folder(path.parent)
        return digest_bytes(data)

    def honours_conditions(self, folder_url: str) -> bool:
        return True


class LocalWriter(Writer):
    """Writes a temporary file in the same folder; `publish` renames it, `discard` removes it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.temporary = _temporary_name(path)
        self.file = self.temporary.open("wb")
        self._begun = 0

    def write(self, data: memoryview) -> int:
        size = self.file.write(data)
        end = self.file.tell()
        if end - self._begun >= BEGUN_BYTES:
            begin_sync(self.file.fileno(), self._begun, end - self._begun)
            self._begun = end
        return size

    def append_files(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> bool:
        if not all(is_local(source.url) for source in sources):
            return False
        self.file.flush()
        files = [(_path(source.url), source.size_bytes) for source in sources]
        start = self.file.tell()
        append_files(self.temporary, start, files, digest, on_bytes)
        self.file.seek(start + sum(size for _, size in files))
        return True

    def append_filled(
        self, size: int, fill: Fill, digest: Any, on_bytes: Callable[[int], object]
    ) -> bool:
        self.file.flush()
        start = self.file.tell()
        append_filled(self.temporary, start, size, fill, digest, on_bytes)
        self.file.seek(start + size)
        return True

    def publish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        with suppress(OSError):  # the disk may be full when the buffer is flushed
            self.file.close()
        self.temporary.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    # Names its process, so that a later run can see that it will never be finished.
    owner = f"{process.machine_mark()}.{os.getpid()}.{process.started(os.getpid())}"
    return path.with_name(f"{TEMPORARY}{owner}.{uuid.uuid4().hex[:8]}-{path.name}")


def is_abandoned(name: str) -> bool:
    """True for the temporary file of a dead process of this machine."""
    if not name.startswith(TEMPORARY):
        return False
    machine, pid, started = [*name.removeprefix(TEMPORARY).split("."), "", ""][:3]
    same = machine == process.machine_mark() and pid.isdigit()
    return same and process.started(int(pid)) != started


def _write_temporary(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The kernel releases this lock when its holder dies, so a killed run blocks no other.
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Unlocked, not only closed: a process forked in between has the descriptor too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
