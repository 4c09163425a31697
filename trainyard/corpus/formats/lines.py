"""Reads the lines of a byte range, in blocks. Any division of a file gives every line once.

A line belongs to the range of its first byte. Each byte is searched once or twice, for lines of any
length. Knows nothing of what a line contains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import cast

from trainyard.corpus.formats.compression import PIECE_BYTES, BrokenError, Passing, contents
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

Lines = list[bytes | bytearray]


BEGINNING = 1024
"""Bytes of an unfinished or long line that are kept for messages."""


class LongLine(bytes):
    """The beginning of a line that is too long to be kept."""


class TornError(Exception):
    """The rest of a file cannot be read.

    offset: where the unfinished line begins. received: bytes of contents so far. beginning: of the
    unfinished line."""

    def __init__(self, reason: str, offset: int, received: int, beginning: bytes) -> None:
        super().__init__(reason)
        self.offset = offset
        self.received = received
        self.beginning = beginning


def lines_of(block: bytes | bytearray) -> Lines:
    """The lines of a block."""
    if isinstance(block, bytearray | LongLine):
        return [block]
    return cast(Lines, block.split(b"\n"))


def data_blocks(
    source: ByteRange, compression: str, max_bytes: int, passing: Passing | None = None
) -> Iterator[tuple[int, bytes | bytearray]]:
    """Lines joined, without the last line feed, about a megabyte at once, and where the first one
    begins. A bytearray or a `LongLine` is one line.

    A long line comes alone. One of more than `max_bytes` becomes a `LongLine` before its end is
    searched, unless one read contains it. passing: is shown the bytes as stored."""
    reader = _Reader(source, bool(compression), max_bytes)
    # One byte early: a line feed there means that a line begins with the range.
    start = max(source.start - 1, 0)
    with closing(contents(source.url, compression, start, source.end, passing)) as pieces:
        try:
            for piece in pieces:
                yield from reader.take(piece)
                if reader.done:
                    return
        except BrokenError as error:
            beginning = bytes(reader.pending[:BEGINNING])
            raise TornError(str(error), reader.offset, reader.position, beginning) from error
    reader.check_end()
    yield from reader.rest()


class _Reader:
    """Cuts pieces into lines. `pending` is the line that has not ended, and begins at `offset`."""

    def __init__(self, source: ByteRange, compressed: bool, max_bytes: int) -> None:
        self.url = source.url
        self.end = sys.maxsize if compressed else source.end
        self.offset = max(source.start - 1, 0)
        self.pending = bytearray()
        self.done = source.start >= source.end
        self._compressed = compressed
        self._max_bytes = max_bytes
        self._is_long = False  # in a line whose beginning was handed out
        self._between = source.start > 0  # in a line that began before the range

    @property
    def position(self) -> int:
        """How far the contents have been read."""
        return self.offset + len(self.pending)

    def take(self, piece: bytes) -> Iterator[tuple[int, bytes | bytearray]]:
        """The lines that end in this piece."""
        if self._between:
            piece = self._skip(piece)
        if self._is_long:
            rest = self._skip_rest(piece)
            if rest is None:
                return
            piece = rest
        cut = self._cut(piece)
        if cut < 0:
            self.pending += piece
            if len(self.pending) > self._max_bytes:
                yield self.offset, LongLine(self.pending[:BEGINNING])
                self.offset, self.pending = self.position, bytearray()
                self._is_long = True
            return
        if len(self.pending) > PIECE_BYTES:
            first = piece.find(b"\n")
            self.pending += piece[:first]
            yield self._release()
            piece, cut = piece[first + 1 :], cut - first - 1
        if cut >= 0:
            data = b"".join((self.pending, memoryview(piece)[:cut]))
            offset, self.offset = self.offset, self.offset + len(data) + 1
            yield offset, data
        self.pending = bytearray(piece[cut + 1 :])

    def rest(self) -> Iterator[tuple[int, bytes | bytearray]]:
        """The last line, if no line feed ended it."""
        if self.pending:
            yield self._release()

    def check_end(self) -> None:
        """Refuse a file that is shorter than it was when the ranges were made."""
        if not self._compressed and self.position < self.end:
            raise DataError(
                f"{self.url} is shorter than the {self.end} bytes that it had when the work was "
                "planned, so it has changed since; run again"
            )

    def _skip(self, piece: bytes) -> bytes:
        """The bytes after the first line feed. If none comes before the last byte of the range, no
        line begins in it, since a line may be longer than many ranges."""
        found = piece.find(b"\n", 0, self.end - 1 - self.offset)
        self.done = found < 0 and self.offset + len(piece) >= self.end - 1
        self._between = found < 0
        skipped = len(piece) if found < 0 else found + 1
        self.offset += skipped
        return piece[skipped:]

    def _skip_rest(self, piece: bytes) -> bytes | None:
        """The bytes after a long line; None if it continues, or ends beyond the range."""
        end = piece.find(b"\n") + 1
        self.offset += end or len(piece)
        self._is_long = not end
        self.done = bool(end) and self.offset >= self.end
        return None if self._is_long or self.done else piece[end:]

    def _cut(self, piece: bytes) -> int:
        """Where in the piece the last line ends; the first line feed at the range's last byte or
        after it is the last that counts."""
        to_end = self.end - 1 - self.position
        if not self._between and to_end < len(piece):
            cut = piece.find(b"\n", max(to_end, 0))
            if cut >= 0:
                self.done = True
                return cut
        return piece.rfind(b"\n")

    def _release(self) -> tuple[int, bytearray]:
        offset, line = self.offset, self.pending
        self.offset += len(line) + 1
        self.pending = bytearray()
        return offset, line
