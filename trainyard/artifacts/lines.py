"""Lines of files of any size, a block in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainyard.artifacts import store
from trainyard.artifacts.digest import hasher
from trainyard.artifacts.manifest import DAMAGED, check_digest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.errors import ArtifactError


def read_lines(url: str) -> Iterator[bytes]:
    """The lines of a file without their ends. Raises ArtifactError if it changes meanwhile."""
    return split_lines(store.read_whole(url))


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of blocks end to end, without their ends; a last one without an end is a line."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def read_listed_lines(url: str, record: FileRecord) -> Iterator[bytes]:
    """The lines of a file that matches its record in a manifest, which is checked first.

    Raises ArtifactError for a file that differs."""
    found = file_record(url, record.path)
    if found.size_bytes != record.size_bytes:
        raise ArtifactError(
            f"{url}: {found.size_bytes} bytes, {MANIFEST} says {record.size_bytes} bytes; {DAMAGED}"
        )
    check_digest(url, record, found.digest)
    return read_lines(url)


def file_record(url: str, path: str) -> FileRecord:
    """The record of a file as it is, by reading all of it."""
    running, size_bytes = hasher(), 0
    for block in store.read_whole(url):
        running.update(block)
        size_bytes += len(block)
    return FileRecord(path, size_bytes, running.hexdigest())
