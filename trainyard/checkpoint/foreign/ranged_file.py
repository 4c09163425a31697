"""A file of any store read by ranges, and a range of it as a file of its own.

Ranges are read, not mapped: pages of a map count as memory of the process for as long as it is
open, and a file may hold all of a model."""

from __future__ import annotations

import io
from typing import Any, BinaryIO, cast

from trainyard.artifacts import store
from trainyard.errors import ArtifactError


class RangedFile:
    """Opened for reading; close it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._file: Any = store.open_input(url)
        try:
            self.size_bytes: int = self._file.seek(0, 2)
        except BaseException:
            self.close()
            raise

    def range(self, begin: int, length: int) -> bytearray:
        """Bytes of the file. Raises ArtifactError for those that it does not have."""
        if begin < 0 or length < 0 or begin + length > self.size_bytes:
            raise ArtifactError(
                f"{self.url}: bytes {begin} to {begin + length} of {self.size_bytes}; it is "
                "truncated"
            )
        self._file.seek(begin)
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            count = self._file.readinto(view[done:])
            if not count:
                raise ArtifactError(f"{self.url}: ends at byte {begin + done}; it is truncated")
            done += count
        return data

    def window(self, begin: int, length: int) -> BinaryIO:
        """A range as a file of its own."""
        return cast(BinaryIO, _Window(self, begin, length))

    def close(self) -> None:
        """Let it go."""
        self._file.close()


class _Window(io.RawIOBase):
    """What `zipfile` needs of a file."""

    def __init__(self, file: RangedFile, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ValueError(f"seek to {self._at}")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        data = bytes(self._file.range(self._begin + self._at, size))
        self._at += size
        return data
