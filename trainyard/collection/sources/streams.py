"""The contents of a byte range of a compressed file whose members stand alone: bzip2 streams of a
multistream dump, gzip members of a WARC file.

A member belongs to the range in which it begins, so any number of readers share a file. Where one
begins is found by the first bytes that every member has, which chance does not write into
compressed data. A reader may go on past its range, for what began in it. Memory is bounded, and a
member that expands without measure is an error."""

from __future__ import annotations

import bz2
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainyard.collection.documents import Place
from trainyard.corpus.formats.compression import CODECS, BrokenError, contents
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import DataError

PIECE_BYTES = 1 << 20
FREE_BYTES = 64 << 20
MAX_RATIO = 1000
"""A member of more than FREE_BYTES expands to at most this many times its size; text of people
comes to ten or twenty."""


class Piece(NamedTuple):
    """Some contents of a member."""

    member: int
    """Where its member begins in the file; for a file that is not compressed, 0."""
    within: int
    """Where it begins in the contents of the member."""
    data: bytes


class PlacedBytes:
    """Contents of a range, piece by piece: what is not done with yet, and where it lies."""

    def __init__(self, source: ByteRange, is_compressed: bool, name: str) -> None:
        """name: of the file, for places."""
        self.data = b""
        self.at = 0
        """How much of `data` is done with."""
        self._source, self._is_compressed, self._name = source, is_compressed, name
        self._base = 0
        """Bytes before `data`, counted from the first piece."""
        self._starts: list[tuple[int, int, int]] = []
        """(bytes before a piece, its member, its place in it) of the pieces in `data`."""

    @property
    def left(self) -> int:
        """Bytes that are not done with."""
        return len(self.data) - self.at

    def add(self, piece: Piece) -> None:
        """Forget what is done with, and take a further piece."""
        self._base += self.at
        self.data, self.at = self.data[self.at :], 0
        while len(self._starts) > 1 and self._starts[1][0] <= self._base:
            del self._starts[0]
        self._starts.append((self._base + len(self.data), piece.member, piece.within))
        self.data += piece.data

    def is_mine(self, at: int) -> bool:
        """Whether what begins at this byte of `data` belongs to the range."""
        member, within = self._where(at)
        return (member if self._is_compressed else within) < self._source.end

    def place(self, length: int) -> Place:
        """Of a document that begins where `at` is."""
        member, within = self._where(self.at)
        if self._is_compressed:
            return Place(self._name, member, length, within)
        return Place(self._name, within, length)

    def _where(self, at: int) -> tuple[int, int]:
        """The member, and the place in it, of a byte of `data`."""
        before, member, within = next(
            start for start in reversed(self._starts) if start[0] <= self._base + at
        )
        return member, within + self._base + at - before


@dataclass(frozen=True, slots=True)
class Members:
    """How the members of a format are found and read."""

    name: str
    begin: re.Pattern[bytes]
    """The first bytes of a member that has contents."""
    begin_bytes: int
    """The most bytes that the pattern needs."""
    new: Callable[[], Any]


MEMBERS = {
    ".bz2": Members("bzip2", re.compile(b"BZh[1-9]1AY&SY"), 10, bz2.BZ2Decompressor),
    ".gz": Members(
        "gzip", re.compile(rb"\x1f\x8b\x08[\x00-\x1f]"), 4, lambda: zlib.decompressobj(wbits=31)
    ),
}
"""By the ending of the file."""


def pieces(
    source: ByteRange, compression: str, is_member: Callable[[bytes], bool] | None = None
) -> Generator[Piece]:
    """The contents of the members that begin in the range, and of those that follow, until the
    caller stops.

    is_member: whether contents that begin so are those of a member, where the first bytes do not
    say it. DataError for a damaged file, one cut short, and one that expands without measure."""
    try:
        if compression in MEMBERS:
            yield from _members(source, MEMBERS[compression], is_member)
        else:
            yield from _whole(source, compression)
    except BrokenError as error:
        raise DataError(f"{source.url}: {error}; fetch the file again") from error


def _whole(source: ByteRange, compression: str) -> Generator[Piece]:
    """Of a file without compression, or one that is a single member."""
    assert compression in CODECS or not compression
    at = source.start
    with closing(contents(source.url, compression, source.start, source.end)) as found:
        for data in found:
            yield Piece(0, at, data)
            at += len(data)


def _members(
    source: ByteRange, members: Members, is_member: Callable[[bytes], bool] | None
) -> Generator[Piece]:
    with closing(contents(source.url, "", source.start, source.end)) as found:
        feed = _Feed(found, source.start)
        if not _find_first(feed, source, members, is_member):
            return
        while True:
            begin = feed.at
            if not feed.more(members.begin_bytes) or not feed.data.strip(b"\0"):
                return
            yield from _member(feed, begin, members)


class _Feed:
    """Bytes of a file, with their place."""

    def __init__(self, source: Iterator[bytes], at: int) -> None:
        self._source = source
        self.at = at
        """Where `data` begins in the file."""
        self.data = b""

    def more(self, wanted: int) -> bool:
        """Whether there are bytes; tries to have this many."""
        while len(self.data) < wanted and (piece := next(self._source, b"")):
            self.data += piece
        return bool(self.data)

    def skip(self, count: int) -> None:
        """Drop the first bytes."""
        self.data = self.data[count:]
        self.at += count


def _find_first(
    feed: _Feed,
    source: ByteRange,
    members: Members,
    is_member: Callable[[bytes], bool] | None,
) -> bool:
    """Move to the first member that begins in the range; False if none does."""
    if source.start == 0:
        return feed.more(members.begin_bytes)
    while feed.more(PIECE_BYTES):
        for found in members.begin.finditer(feed.data):
            if feed.at + found.start() >= source.end:
                return False
            if is_member is None or is_member(_beginning(feed.data[found.start() :], members)):
                feed.skip(found.start())
                return True
        last = len(feed.data) < PIECE_BYTES
        if last or feed.at >= source.end:
            return False
        feed.skip(len(feed.data) - (members.begin_bytes - 1))
    return False


def _beginning(data: bytes, members: Members) -> bytes:
    """Up to a kilobyte of the contents of what may be a member; empty if it is none."""
    try:
        return bytes(members.new().decompress(data[:PIECE_BYTES], 1024))
    except (OSError, ValueError, zlib.error):
        return b""


def _member(feed: _Feed, begin: int, members: Members) -> Generator[Piece]:
    """One member, whole; leaves the feed at its end."""
    decoder, made, is_zlib = members.new(), 0, members.name == "gzip"
    try:
        while not decoder.eof:
            if not is_zlib and not decoder.needs_input:
                data = decoder.decompress(b"", PIECE_BYTES)
            elif feed.more(1):
                given = feed.data
                feed.skip(len(given))
                data = decoder.decompress(given, PIECE_BYTES)
                if is_zlib and not decoder.eof:
                    _put_back(feed, decoder.unconsumed_tail)
            else:
                raise BrokenError(f"the {members.name} data end in the middle: it was cut short")
            if decoder.eof:
                _put_back(feed, decoder.unused_data)
            if data:
                yield Piece(begin, made, data)
                made += len(data)
            if made > FREE_BYTES and made > MAX_RATIO * (feed.at - begin):
                raise BrokenError(
                    f"the {members.name} data at byte {begin} expand more than {MAX_RATIO} times; "
                    "no text does"
                )
    except (OSError, ValueError, zlib.error) as error:
        raise BrokenError(
            f"not {members.name} data at byte {begin}, or damaged ({error})"
        ) from error


def _put_back(feed: _Feed, data: bytes) -> None:
    feed.data = data + feed.data
    feed.at -= len(data)
