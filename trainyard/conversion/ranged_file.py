"""Reads ranges of a file in any store, and presents a range as a file of its own.

Ranges are read, not mapped: mapped pages count as memory of the process, and a file may be as large
as a model."""

from __future__ import annotations

import io
import zlib
from typing import Any, BinaryIO, cast

from trainyard.artifacts import store
from trainyard.errors import ArtifactError

CHUNK_BYTES = 2**20
"""A checksum reads this much at once: small enough to stay in the processor's cache."""


class RangedFile:
    """A file that is open for reading; close it after use."""

    def __init__(self, url: str, part: tuple[int, int] | None = None) -> None:
        """part: first byte and length of the range to read as a file; None: the whole file."""
        self.url = url
        self._begin = 0
        self._file: Any = store.open_input(url)
        try:
            self.size_bytes: int = self._file.seek(0, 2)
            if part is not None:
                self._check(*part)
                self._begin, self.size_bytes = part
        except BaseException:
            self.close()
            raise

    def range(self, begin: int, length: int) -> bytearray:
        """Bytes of the file. Raises ArtifactError for a range beyond its end."""
        self._check(begin, length)
        data = bytearray(length)
        self._file.seek(self._begin + begin)
        self._fill(memoryview(data), begin)
        return data

    def range_and_crc(self, begin: int, length: int) -> tuple[bytearray, int]:
        """Bytes of the file and their CRC-32, computed chunk by chunk while in cache."""
        self._check(begin, length)
        data, crc = bytearray(length), 0
        view = memoryview(data)
        self._file.seek(self._begin + begin)
        for at in range(0, length, CHUNK_BYTES):
            part = view[at : at + CHUNK_BYTES]
            self._fill(part, begin + at)
            crc = zlib.crc32(part, crc)
        return data, crc

    def crc(self, begin: int, length: int) -> int:
        """The CRC-32 of bytes of the file, without keeping them in memory."""
        self._check(begin, length)
        scratch, crc = memoryview(bytearray(min(length, CHUNK_BYTES))), 0
        self._file.seek(self._begin + begin)
        for at in range(0, length, CHUNK_BYTES):
            part = scratch[: length - at]
            self._fill(part, begin + at)
            crc = zlib.crc32(part, crc)
        return crc

    def _check(self, begin: int, length: int) -> None:
        if begin < 0 or length < 0 or begin + length > self.size_bytes:
            raise ArtifactError(
                f"{self.url}: has {self.size_bytes} bytes, but bytes {begin} to {begin + length} "
                "are needed; it is truncated"
            )

    def _fill(self, memory: memoryview, begin: int) -> None:
        """Read until memory is full. begin: its offset in the range, for messages."""
        done = 0
        while done < len(memory):
            count = self._file.readinto(memory[done:])
            if not count:
                raise ArtifactError(f"{self.url}: ends at byte {begin + done}; it is truncated")
            done += count

    def window(self, begin: int, length: int) -> BinaryIO:
        """A range as a separate file."""
        return cast(BinaryIO, _Window(self, begin, length))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Window(io.RawIOBase):
    """A range as a file for `zipfile`."""

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
