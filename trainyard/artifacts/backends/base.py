"""The interface of a kind of store, a backend of `artifacts.store`.

A missing file is a FileNotFoundError here; `store` turns it into an error with a message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from trainyard.artifacts.backends.fast_copy import Fill

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to copy, with the size and version seen before."""

    url: str
    size_bytes: int
    version: str


Read = Callable[[str, int, int, str | None], bytes]
"""Bytes of a file in a known version, as `store.read_range` returns them."""


class Writer(Protocol):
    """A file being written: invisible until it is published."""

    def write(self, data: memoryview) -> int:
        """Append."""

    def write_for(self, num_writers: int) -> None:
        """Send as much at once as so many writers would; called before the first byte."""
        return None

    def append_files(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> bool:
        """Append whole files and update `digest` with every byte; `read` reads from any store.

        Returns False, and does nothing, where the store has no faster way than `write`."""
        return False

    def append_filled(
        self, size: int, fill: Fill, digest: Any, on_bytes: Callable[[int], object]
    ) -> bool:
        """Append `size` bytes that `fill` puts into memory, and update `digest` with every byte.

        Returns False, and does nothing, where the store has no faster way than `write`."""
        return False

    def publish(self) -> None:
        """Make it appear under its name, durably."""

    def discard(self) -> None:
        """Leave no trace."""


@contextmanager
def log_failure() -> Iterator[None]:
    """Log what a clean-up raises, so that it does not hide the error that caused the clean-up."""
    try:
        yield
    except Exception as error:
        log.warning("could not clean up: %s", error)


class Backend(Protocol):
    """One kind of store: a file system, or objects behind fsspec."""

    def open_input(self, url: str) -> BinaryIO:
        """A seekable file for reading."""

    def read_range(self, url: str, start: int, end: int, version: str | None) -> bytes:
        """Bytes `start` up to `end`, fewer at the end of the file.

        Raises ArtifactError when the file is no longer in that version."""

    def open_output(self, url: str) -> Writer:
        """Begin a file."""

    def size_and_version(self, url: str) -> tuple[int, str]:
        """Bytes, and a version that changes with the contents."""

    def is_file(self, url: str) -> bool:
        """True for a file; False for a folder and for a missing name."""

    def list_files(self, url: str) -> dict[str, int]:
        """Relative name to size of all files below a folder; empty for a missing folder."""

    def list_folder(self, url: str) -> dict[str, tuple[int, str]]:
        """Name to size and version of the files directly in a folder, sorted; empty for a missing
        folder."""

    def list_subfolders(self, url: str) -> list[str]:
        """Names of the folders directly in a folder, sorted; empty for a missing folder."""

    def glob(self, url: str) -> list[str]:
        """The URLs that match a pattern, sorted."""

    def delete(self, url: str) -> None:
        """Remove a file if it exists."""

    def delete_tree(self, url: str) -> None:
        """Remove everything below a folder."""

    def move_tree(self, source: str, target: str) -> None:
        """Move a folder to a free name."""

    def read_version(self, url: str) -> tuple[bytes, str]:
        """Contents and version of a small file."""

    def read_document(self, url: str) -> bytes:
        """Contents of a small file that anyone may have named."""

    def put_if_absent(self, url: str, data: bytes) -> str | None:
        """The version written, or None if the name is in use."""

    def replace_if_match(self, url: str, data: bytes, version: str) -> str | None:
        """The version written, or None when the file is no longer in the version that was read."""

    def honours_conditions(self, folder_url: str) -> bool:
        """Whether the store honours the conditions of the two methods above."""


class Multipart(Protocol):
    """What a multipart upload needs from an object store."""

    def call(self, method: str, **arguments: Any) -> Any:
        """One call of the store's API, by its name there."""

    def address(self, url: str) -> dict[str, str]:
        """Bucket and key."""

    def holds(self, url: str) -> bool:
        """True for an object that this store can copy itself."""

    def size_and_version(self, url: str) -> tuple[int, str]:
        """Of the current object."""
