"""The contents of a file, compressed or not, as a stream of pieces.

Several members or frames end to end are one file, as the command line tools have it. A file that is
cut short, damaged, or followed by something else raises `BrokenError` and never ends quietly.
Pieces are bounded, so that a hostile file cannot fill the memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO, NamedTuple

from trainyard.artifacts import store
from trainyard.errors import ConfigError

PIECE_BYTES = 1 << 20
"""Contents handed on at once, at most (zstandard: 512 MiB of a file made for the purpose)."""

BLOCK_BYTES = 8 << 20
"""Bytes of one request to a remote store."""
TAIL_BYTES = 1 << 17
"""Bytes first read beyond a range, for the rest of its last line."""

INPUT_BYTES = 1 << 14
"""Bytes of one read of the file. Few, because zstandard has no limit on its output, and because the
bytes behind a member are copied, which is slow for many small members."""

XZ_MEMORY_BYTES = 1 << 30
"""Memory that an .xz file may need; `xz -9` needs 65 MB."""

Feed = Callable[[Any, bytes], Iterator[bytes]]


class BrokenError(Exception):
    """The rest of the file cannot be read; the contents before are good."""


class Codec(NamedTuple):
    """How the members of a compressed file are read."""

    name: str
    new: Callable[[], Any]
    """A decompressor object for one member; it has `eof` and `unused_data`."""
    feed: Feed
    """Input to such an object, contents out of it in pieces."""
    padded: bool = False
    """Zeros behind the last member mean nothing."""


def contents(url: str, compression: str, start: int = 0, until: int = 0) -> Generator[bytes]:
    """The contents in pieces; where nothing is compressed from a byte on, and probably not far
    beyond byte `until`.

    Raises BrokenError for a compressed file that is damaged, and the errors of the store."""
    if until and not compression and not store.is_local(url):
        yield from _ranges(url, start, until)
        return
    with store.operation("read", url) as backend, backend.open_input(url) as file:
        if compression:
            yield from _gathered(_decompressed(file, CODECS[compression]))
            return
        file.seek(start)
        while piece := file.read(PIECE_BYTES):
            yield piece


def _ranges(url: str, start: int, until: int) -> Iterator[bytes]:
    """The contents in the fewest requests: a file object would read ahead a whole unit of work."""
    size = store.info(url).size_bytes
    until += TAIL_BYTES
    while start < size:
        end = min(size, start + BLOCK_BYTES, max(until, start + TAIL_BYTES))
        if 0 < until - end < TAIL_BYTES * 2:
            end = min(size, until)
        block = store.read_range(url, start, end)
        for at in range(0, len(block), PIECE_BYTES):
            yield block[at : at + PIECE_BYTES]
        start = end


def _decompressed(file: BinaryIO, codec: Codec) -> Iterator[bytes]:
    members = 0
    decoder: Any = None  # of the member that has begun
    while data := file.read(INPUT_BYTES):
        while data:
            if decoder is None:
                if members and codec.padded and not data.strip(b"\0"):
                    break
                decoder = codec.new()
            try:
                yield from codec.feed(decoder, data)
            except MemoryError:
                raise
            except Exception as error:  # each library has its own
                raise BrokenError(_words(codec, error, members)) from error
            if not decoder.eof:
                break
            data, decoder = decoder.unused_data, None
            members += 1
    if decoder is not None:
        raise BrokenError(f"the {codec.name} data end in the middle: the file was cut short")


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Small pieces put together; what came before a fault is handed on before it is raised."""
    held: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            if held and size + len(piece) > PIECE_BYTES:
                yield b"".join(held)
                held, size = [], 0
            held.append(piece)
            size += len(piece)
    except BrokenError:
        yield b"".join(held)
        raise
    yield b"".join(held)


def _words(codec: Codec, error: Exception, members: int) -> str:
    where = f" behind {members} whole member{'s'[: members > 1]}" if members else ""
    return f"no {codec.name} data, or damaged{where} ({error})"


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
            "--input: .zst files need the package zstandard, which is not installed; trainyard's "
            "extra [tokenize] brings it"
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
