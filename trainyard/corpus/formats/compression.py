"""Reads the contents of a file, compressed or not, as a stream of pieces.

Concatenated members or frames are one file, as for the command line tools. A file that is
truncated, damaged, or followed by other data raises `BrokenError`. The size of pieces is bounded,
so a hostile file cannot fill the memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO, NamedTuple

from trainyard.artifacts import store
from trainyard.errors import ConfigError

PIECE_BYTES = 1 << 20
"""Largest piece of contents (zstandard: up to 512 MiB, from a hostile file)."""

BLOCK_BYTES = 8 << 20
"""Bytes of one request to a remote store."""
TAIL_BYTES = 1 << 17
"""Bytes to read beyond a range at first, for the rest of its last line."""

INPUT_BYTES = 1 << 14
"""Bytes of one read of the file. It is small, because zstandard's output has no limit, and because
the bytes after a member are copied, which is slow for many small members."""

XZ_MEMORY_BYTES = 1 << 30
"""Memory that an .xz file may need; `xz -9` needs 65 MB."""

Feed = Callable[[Any, bytes], Iterator[bytes]]

Passing = Callable[[int, bytes], None]
"""Is shown the bytes of a file as they are read, each with its offset in the file."""


class BrokenError(Exception):
    """The rest of the file cannot be read; the contents so far are good."""


class Codec(NamedTuple):
    """How to read the members of a compressed file."""

    name: str
    new: Callable[[], Any]
    """Makes a decompressor object for one member, with `eof` and `unused_data`."""
    feed: Feed
    """Passes input to such an object, and yields its output in pieces."""
    padded: bool = False
    """Whether to ignore zeros after the last member."""


def contents(
    url: str, compression: str, start: int = 0, until: int = 0, passing: Passing | None = None
) -> Generator[bytes]:
    """The contents in pieces. An uncompressed file is read from byte `start` on; `until` is where
    the caller probably stops. passing: is shown the bytes as stored.

    Raises BrokenError for a damaged compressed file, and the errors of the store."""
    passing = passing or _ignore
    if until and not compression and not store.is_local(url):
        yield from _ranges(url, start, until, passing)
        return
    with store.operation("read", url) as backend, backend.open_input(url) as file:
        if compression:
            yield from _gathered(_decompressed(file, CODECS[compression], passing))
            return
        file.seek(start)
        rest = INPUT_BYTES
        while piece := file.read(min(PIECE_BYTES, until - start if start < until else rest)):
            rest *= 1 if start < until else 2  # of the last line, of which little is known
            passing(start, piece)
            start += len(piece)
            yield piece


def _ignore(offset: int, data: bytes) -> None:
    """No one wants to see the bytes."""


def _ranges(url: str, start: int, until: int, passing: Passing) -> Iterator[bytes]:
    """The contents in few requests: a file object would read ahead as much as a unit of work."""
    size = store.info(url).size_bytes
    until += TAIL_BYTES
    while start < size:
        end = min(size, start + BLOCK_BYTES, max(until, start + TAIL_BYTES))
        if 0 < until - end < TAIL_BYTES * 2:
            end = min(size, until)
        block = store.read_range(url, start, end)
        passing(start, block)
        for at in range(0, len(block), PIECE_BYTES):
            yield block[at : at + PIECE_BYTES]
        start = end


def _decompressed(file: BinaryIO, codec: Codec, passing: Passing) -> Iterator[bytes]:
    members = offset = 0
    decoder: Any = None  # of the current member
    while data := file.read(INPUT_BYTES):
        passing(offset, data)
        offset += len(data)
        while data:
            if decoder is None:
                if members and codec.padded and not data.strip(b"\0"):
                    break
                decoder = codec.new()
            try:
                yield from codec.feed(decoder, data)
            except MemoryError:
                raise
            except Exception as error:  # each library raises its own kinds
                raise BrokenError(_message(codec, error, members)) from error
            if not decoder.eof:
                break
            data, decoder = decoder.unused_data, None
            members += 1
    if decoder is not None:
        raise BrokenError(f"the {codec.name} data end in the middle: the file is truncated")


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Joins small pieces. Yields the contents before a BrokenError before raising it."""
    pending: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            if pending and size + len(piece) > PIECE_BYTES:
                yield b"".join(pending)
                pending, size = [], 0
            pending.append(piece)
            size += len(piece)
    except BrokenError:
        yield b"".join(pending)
        raise
    yield b"".join(pending)


def _message(codec: Codec, error: Exception, members: int) -> str:
    where = f" after {members} whole member{'s'[: members > 1]}" if members else ""
    return f"not {codec.name} data, or damaged{where} ({error})"


def _feed_zlib(decoder: Any, data: bytes) -> Iterator[bytes]:
    while data and not decoder.eof:
        yield decoder.decompress(data, PIECE_BYTES)
        data = decoder.unconsumed_tail


def _feed_bounded(decoder: Any, data: bytes) -> Iterator[bytes]:
    """bz2 and lzma keep the input that they have not used yet."""
    yield decoder.decompress(data, PIECE_BYTES)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", PIECE_BYTES)


def _feed_zstd(decoder: Any, data: bytes) -> Iterator[bytes]:
    yield decoder.decompress(data)


def _new_zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "--input: .zst files need the package zstandard, which is not installed; run "
            "`pip install '.[tokenize]'` in the checkout"
        ) from error
    return zstandard.ZstdDecompressor().decompressobj()


def _new_xz() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)


CODECS = {
    ".gz": Codec("gzip", lambda: zlib.decompressobj(wbits=31), _feed_zlib, padded=True),
    ".zst": Codec("zstd", _new_zstd, _feed_zstd),
    ".xz": Codec("xz", _new_xz, _feed_bounded, padded=True),
    ".bz2": Codec("bzip2", bz2.BZ2Decompressor, _feed_bounded),
}
"""How a file is compressed, by the last ending of its name."""
