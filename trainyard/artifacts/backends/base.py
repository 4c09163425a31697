"""What the door asks of a kind of store. Missing things are FileNotFoundError here; the door words
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from trainyard.artifacts.backends.uncached import Fill


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be copied, as it was looked at before."""

    url: str
    size_bytes: int
    version: str


Read = Callable[[str, int, int, str | None], bytes]
"""Bytes of a file in a known version, as `store.read_range` gives them."""


class Writer(Protocol):
    """A file on its way in: invisible until it is published."""

    def write(self, data: memoryview) -> int:
        """Append."""

    def append_files(
        self,
        sources: Sequence[SourceFile],
        digest: Any,
        on_bytes: Callable[[int], object],
        read: Read,
    ) -> bool:
        """Append whole files, telling `digest` of every byte; False, and nothing done, where this
        kind of store knows no better way than to read and write them. `read`: of any store."""

    def append_filled(
        self, size: int, fill: Fill, digest: Any, on_bytes: Callable[[int], object]
    ) -> bool:
        """Append `size` bytes that `fill` puts into memory of ours, telling `digest` of every byte;
        False, and nothing done, where that is no better than to write them."""

    def publish(self) -> None:
        """Make it appear under its name, durably."""

    def discard(self) -> None:
        """Leave no trace."""


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
        """Bytes, and what changes when the contents do."""

    def is_file(self, url: str) -> bool:
        """True for a file, false for nothing and for a folder."""

    def list_files(self, url: str) -> dict[str, int]:
        """Relative name to size of everything below a folder; empty for no folder."""

    def list_folder(self, url: str) -> dict[str, int]:
        """Name to size of the files directly in a folder; empty for no folder."""

    def list_subfolders(self, url: str) -> list[str]:
        """Names of the folders directly in a folder, sorted; none for no folder."""

    def glob(self, url: str) -> list[str]:
        """The URLs that match a pattern, sorted."""

    def delete(self, url: str) -> None:
        """Remove a file if it is there."""

    def delete_tree(self, url: str) -> None:
        """Remove everything below a folder."""

    def move_tree(self, source: str, target: str) -> None:
        """Move a folder to a name that is free."""

    def read_version(self, url: str) -> tuple[bytes, str]:
        """Contents and version of a small file."""

    def put_if_absent(self, url: str, data: bytes) -> str | None:
        """The version written, or None when something is there already."""

    def replace_if_match(self, url: str, data: bytes, version: str) -> str | None:
        """The version written, or None when it is no longer the one that was read."""

    def honours_conditions(self, folder_url: str) -> bool:
        """Whether the two above can be relied on."""


class Multipart(Protocol):
    """What an upload in parts asks of an object store."""

    def call(self, method: str, **arguments: Any) -> Any:
        """One call of the store by its own name."""

    def place(self, url: str) -> dict[str, str]:
        """Bucket and key."""

    def holds(self, url: str) -> bool:
        """True for an object that this store could copy by itself."""

    def size_and_version(self, url: str) -> tuple[int, str]:
        """Of an object as it is now."""
