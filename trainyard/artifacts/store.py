"""All access to files and objects: local paths, file://, s3:// and other fsspec URLs alike.

Calls `observers` before every operation; tests use that to kill a run at the n-th. A missing file
is an ArtifactError, refused credentials are a ConfigError, a store that fails is an
InfrastructureError; each names the URL."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

from trainyard.artifacts.backends import local
from trainyard.artifacts.backends.base import Backend, SourceFile, Writer
from trainyard.artifacts.backends.fast_copy import Fill, filled
from trainyard.artifacts.backends.local import LocalBackend
from trainyard.artifacts.backends.readahead import blocks, read_in_order, whole
from trainyard.artifacts.digest import LARGE, FileDigests, digesting, hasher
from trainyard.artifacts.error_text import (
    broken_link,
    store_fault,
    system_fault,
    what_is_there,
    why_absent,
)
from trainyard.artifacts.strict_json import check_depth, parse_json
from trainyard.artifacts.urls import (
    basename,
    has_glob,
    is_hidden,
    is_local,
    is_web,
    join,
    local_path,
    parent,
    refuse_secrets,
)
from trainyard.errors import ArtifactError, ConfigError, TrainyardError

observers: list[Callable[[str, str], None]] = []
"""Called with (operation, url) before each operation."""

CHUNK = 2**22

__all__ = ["FileInfo", "FileRecord", "OutputFile", "SourceFile"]
__all__ += ["basename", "is_local", "join", "local_path", "parent"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of an artifact as its manifest lists it."""

    path: str
    """Name relative to the output: `a/b.json` in a directory, `_text_document.bin` after a
    prefix."""
    size_bytes: int
    digest: str
    volatile: bool = False
    """Timings, logs, cards: in the manifest, but not in the output digest."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size and version of a file, from the store without reading it."""

    size_bytes: int
    version: str
    """Modification time or ETag: changes when the contents change."""


def backend(url: str) -> Backend:
    """The kind of store behind a URL."""
    refuse_secrets(url)
    if is_local(url):
        return LocalBackend()
    protocol = url.partition("://")[0]
    if protocol in ("s3", "s3a"):
        from trainyard.artifacts.backends.s3 import S3Backend

        return S3Backend(protocol)
    if is_web(url):
        from trainyard.artifacts.backends.http import HttpBackend

        return HttpBackend(protocol)
    from trainyard.artifacts.backends.fsspec import FsspecBackend

    return FsspecBackend(protocol)


@contextmanager
def operation(name: str, url: str) -> Iterator[Backend]:
    """Call the observers, yield the backend, and turn its errors into errors of ours."""
    for observer in observers:
        observer(name, url)
    try:
        yield backend(url)
    except TrainyardError:
        raise
    except OSError as error:
        raise system_fault(url, name, error) from error
    except ValueError as error:
        if "endpoint" in str(error).lower():
            raise ConfigError(f"AWS_ENDPOINT_URL is not a URL: {error}") from error
        raise
    except Exception as error:
        if type(error).__module__.startswith(
            ("botocore", "aiobotocore", "aiohttp", "s3fs", "fsspec")
        ):
            raise store_fault(url, name, error) from error
        raise


# --- reading ----------------------------------------------------------------------------------


def open_input(url: str) -> BinaryIO:
    """A seekable binary file for reading."""
    with operation("read", url) as store:
        return store.open_input(url)


def read_bytes(url: str) -> bytes:
    """The whole contents."""
    with operation("read", url) as store:
        return store.read_version(url)[0]


def read_document(url: str) -> bytes:
    """The whole contents of a document that anyone may have named; a web server may redirect only
    within itself."""
    with operation("read", url) as store:
        return store.read_document(url)


def read_range(url: str, start: int, end: int, version: str | None = None) -> bytes:
    """Bytes `start` up to `end`.

    Raises ArtifactError for a file that ends before, or is no longer in the version given."""
    if start >= end:
        return b""
    with operation("read", url) as store:
        data = store.read_range(url, start, end, version)
    if len(data) != end - start:
        raise ArtifactError(
            f"{url}: ends at byte {start + len(data)}, not at {end}; it was cut short or changed"
        )
    return data


def read_files(sources: Sequence[SourceFile]) -> Iterator[bytes]:
    """All bytes of files, end to end, a block at a time; some blocks are read ahead.

    Raises ArtifactError for a file that changed since it was looked at."""
    return read_in_order(blocks(whole(sources)), read_range)


def read_whole(url: str) -> Iterator[bytes]:
    """All bytes of a file, a block at a time; ArtifactError if it changes during the read."""
    found = info(url)
    return read_files([SourceFile(url, found.size_bytes, found.version)])


def read_json(url: str) -> Any:
    """The JSON document in a file; ArtifactError says where it is malformed.

    For a file that a manifest lists, use `manifest.read_listed_json`."""
    document = parse_json(read_bytes(url), url)
    check_depth(document, url)
    return document


def exists(url: str) -> bool:
    """True when there is a file or object of that name."""
    with operation("stat", url) as store:
        return store.is_file(url)


def existing(folder_url: str, names: Iterable[str]) -> list[str]:
    """Those of the names that are files or objects in a folder; a question for each."""
    with operation("stat", folder_url) as store:
        path = local_path(folder_url)
        if path is None:
            return [name for name in names if store.is_file(join(folder_url, name))]
        return [name for name in names if local.is_file(f"{path}/{name}")]


def info(url: str) -> FileInfo:
    """Size and version, without reading the file."""
    with operation("stat", url) as store:
        return FileInfo(*store.size_and_version(url))


def list_files(url: str) -> dict[str, int]:
    """Every file below a folder: relative name to size in bytes, sorted; empty if missing."""
    with operation("list", url) as store:
        return store.list_files(url)


def list_folder(url: str) -> dict[str, int]:
    """The files directly in a folder: name to size in bytes, sorted; empty if missing."""
    return {name: found.size_bytes for name, found in look_at_folder(url).items()}


def look_at_folder(url: str) -> dict[str, FileInfo]:
    """The files directly in a folder: what `info` says of each, sorted; empty if missing."""
    with operation("list", url) as store:
        return {name: FileInfo(*found) for name, found in store.list_folder(url).items()}


def expand(url: str) -> list[str]:
    """The files that a URL, a pattern or a folder stands for, sorted; hidden ones are passed over.
    Raises ArtifactError when there is none, or for a link that leads to no file."""
    with operation("list", url) as store:
        if has_glob(url) and not store.is_file(url):
            found = store.glob(url)
        elif store.is_file(url):
            return [url]
        else:
            found = [join(url, name) for name in store.list_files(url) if not is_hidden(name)]
        if broken := broken_link(url):
            raise ArtifactError(f"{broken[0]}: {broken[1]}")
    if not found:
        absent = why_absent(url, "") or f"no file matches; {what_is_there(url)}"
        raise ArtifactError(f"{url}: {absent}")
    return found


# --- writing ----------------------------------------------------------------------------------


class OutputFile(io.RawIOBase):
    """A file that is hashed while it is written, and appears under its name on a clean close."""

    def __init__(self, url: str, name: str, volatile: bool) -> None:
        super().__init__()
        self._writer: Writer | None = None
        with operation("open", url) as store:
            self._writer = store.open_output(url)
        self.url = url
        self._name = name
        self._volatile = volatile
        self.digest: Any = hasher()
        """Of the bytes so far. Before the first, a caller may put one that takes more of them."""
        self._size = 0
        self._record: FileRecord | None = None

    def writable(self) -> bool:
        """Always; io.BufferedWriter and TextIOWrapper ask."""
        return True

    def write(self, data: Any) -> int:
        """Append bytes or anything with a contiguous buffer."""
        view = memoryview(data).cast("B")
        with digesting(self.digest, view):
            for start in range(0, len(view), CHUNK):
                with operation("write", self.url):
                    assert self._writer is not None
                    self._writer.write(view[start : start + CHUNK])
        self._size += len(view)
        return len(view)

    def write_for(self, num_writers: int) -> None:
        """Send as many parts at once as so many writers would, whose bytes this file takes."""
        assert self._writer is not None
        self._writer.write_for(num_writers)

    def append_files(
        self, sources: Sequence[SourceFile], on_bytes: Callable[[int], object] = lambda _: None
    ) -> list[str]:
        """Append whole files, none of them empty, of any store by its fastest way: on a file system
        past the page cache, in an object store by a copy in the store. Returns their digests.

        Calls `on_bytes` with each number of bytes done. Raises ArtifactError for a source that
        changed since it was looked at."""
        sizes = [source.size_bytes for source in sources]
        digests = FileDigests(sizes, self.digest)
        with operation("write", self.url):
            assert self._writer is not None
            done = self._writer.append_files(sources, digests, on_bytes, read_range)
        if done:
            self._size += sum(sizes)
        else:
            digests = FileDigests(sizes)
            for block in read_files(sources):
                self.write(block)
                digests.update(block)
                on_bytes(len(block))
        for source in sources:
            if info(source.url) != FileInfo(source.size_bytes, source.version):
                raise ArtifactError(f"{source.url}: changed while it was being read")
        return digests.found

    def append_filled(
        self, size: int, fill: Fill, on_bytes: Callable[[int], object] = lambda _: None
    ) -> None:
        """Append `size` bytes; each call of `fill` puts the next ones into memory. Large sizes go
        past the page cache on a file system. Calls `on_bytes` with each number of bytes done."""
        done = False
        if size >= LARGE:
            with operation("write", self.url):
                assert self._writer is not None
                done = self._writer.append_filled(size, fill, self.digest, on_bytes)
        self._size += size if done else 0
        for block in filled(0 if done else size, fill):
            self.write(block)
            on_bytes(len(block))

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def close(self) -> None:
        """Publish under the final name."""
        if self._record is None and not self.closed:
            with operation("publish", self.url):
                assert self._writer is not None
                self._writer.publish()
            self._record = FileRecord(
                self._name, self._size, self.digest.hexdigest(), self._volatile
            )
        super().close()

    def discard(self) -> None:
        """Remove what was written, without publishing."""
        if not self.closed:
            if self._writer is not None:
                self._writer.discard()
            super().close()

    @property
    def record(self) -> FileRecord:
        """Name, size and digest; after a clean close."""
        assert self._record is not None, "the file is not closed yet"
        return self._record

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.discard()  # unless it was published

    def __del__(self) -> None:
        # io.RawIOBase would close, and so publish, a file that was never closed.
        if not self.closed:
            self.discard()


def open_output(url: str, name: str | None = None, volatile: bool = False) -> OutputFile:
    """Start a file; `name` is the path in its record (default: the last part of the URL)."""
    return OutputFile(url, basename(url) if name is None else name, volatile)


def write_bytes(
    url: str, data: bytes, name: str | None = None, volatile: bool = False
) -> FileRecord:
    """Write a whole file."""
    with open_output(url, name, volatile) as file:
        file.write(data)
    return file.record


def delete(url: str) -> None:
    """Remove a file if it exists."""
    with operation("delete", url) as store:
        store.delete(url)


def delete_tree(url: str) -> None:
    """Remove everything below a folder."""
    with operation("delete", url) as store:
        store.delete_tree(url)


def move_tree(url: str, target: str) -> None:
    """Move a folder: a rename on a file system, copies inside an object store."""
    with operation("move", url) as store:
        store.move_tree(url, target)


def is_abandoned(name: str) -> bool:
    """True for a temporary file of a killed run of this machine."""
    return local.is_abandoned(basename(name))
