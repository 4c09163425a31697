"""Finds the arrays of an HDF5 file without the HDF5 library.

The library opens whatever a file names: other HDF5 files (external links, virtual arrays), any file
at all as the storage of an array, filters as shared libraries; and damaged bytes may crash it. Here
an array lies in the file itself, in one piece and uncompressed, or it is refused. That is how h5py
writes an array by default, and how Megatron-LM writes all of its own.

A file, little-endian; `o` is an offset and `l` a length, 8 bytes each:

    superblock 0, 1   signature, version u8, [4], sizes of o and l u8 u8, [9 or 13], base o, [3 o],
                      root group: [o], object header o
    superblock 2, 3   signature, version u8, sizes of o and l u8 u8, [1], base o, [2 o], root o

    object header 1   version u8, [1], messages u16, [4], size u32, [4], messages:
                      type u16, size u16, flags u8, [3], body
    object header 2   "OHDR", version u8, flags u8, [16 bytes of times], [4], size of 1 to 8 bytes,
                      messages: type u8, size u16, flags u8, [2], body; a checksum follows

    members of a group: messages "link", or a message "symbol table": a tree of type 1 ("TREE") of
    nodes ("SNOD") with entries (offset of the name, header o), and the heap of the names ("HEAP")
    an array: messages "dataspace", "datatype", "layout"

Tests compare with what h5py reads."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ArtifactError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
NOWHERE = 2**64 - 1
"""The offset of what was never written."""

MAX_PIECE_BYTES = 1 << 16
"""Largest piece of a header, a tree or a heap; files with a few arrays have some hundred bytes."""
MAX_PIECES = 64
"""Pieces that finding one array may take, which ends circles."""

DATASPACE, LINK_INFO, DATATYPE, LINK, EXTERNAL_FILES, LAYOUT = 0x1, 0x2, 0x3, 0x6, 0x7, 0x8
FILTERS, CONTINUATION, SYMBOL_TABLE = 0xB, 0x10, 0x11
SHARED = 0x02
"""Flag of a message that lies elsewhere."""
CONTIGUOUS = 1
HARD = 0
MOST_DIMENSIONS = 32
MOST_COLUMNS = 1 << 40
"""Of an empty array; numpy makes none of more."""

DTYPES = {
    bytes.fromhex("00000000 04000000 0000 2000"): "<u4",
    bytes.fromhex("00000000 08000000 0000 4000"): "<u8",
    bytes.fromhex("00080000 08000000 0000 4000"): "<i8",
    bytes.fromhex("01201f00 04000000 0000 2000 17 08 00 17 7f000000"): "<f4",
}
"""Datatypes as they are encoded, without the version, and numpy's names of them."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file."""

    offset: int
    """Of its first byte."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def within(self, data: bytes) -> NDArray[Any]:
        """The array, as a view of the bytes of the whole file."""
        count = math.prod(self.shape)
        if not count:
            return np.empty(self.shape, self.dtype)
        values = np.frombuffer(data, self.dtype, count, self.offset).reshape(self.shape)
        return values if values.flags.aligned else values.copy()

    def mapped(self, file: BinaryIO) -> NDArray[Any]:
        """The array, as a view of a file on this machine."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        return np.asarray(np.memmap(file, self.dtype, "r", self.offset, self.shape))


class _RefusedError(Exception):
    """Why an array is not read."""


def find_array(file: BinaryIO, size_bytes: int, name: str, url: str) -> StoredArray:
    """Where an array of the root group lies. Raises ArtifactError, which says why there is none.

    size_bytes: of the file. url: names it in messages."""
    with _refusing(name, url):
        return _Reader(file, size_bytes).array(name)


def has_array(file: BinaryIO, size_bytes: int, name: str, url: str) -> bool:
    """Whether the root group has a member of that name. Raises ArtifactError for a damaged file."""
    with _refusing(name, url):
        return name in _Reader(file, size_bytes).members()


@contextmanager
def _refusing(name: str, url: str) -> Iterator[None]:
    try:
        yield
    except _RefusedError as error:
        why = str(error)
    except (struct.error, IndexError):
        why = "the file is damaged: a piece of it is too short"
    else:
        return
    raise ArtifactError(f"{url}: no array {name!r} to read: {why}")


class _Reader:
    """One search in one file."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file, self._size = file, size_bytes
        self._left = MAX_PIECES

    def members(self) -> dict[str, int]:
        """Names and headers of what is in the root group."""
        return dict(self._members(self._root()))

    def array(self, name: str) -> StoredArray:
        """The array of that name in the root group."""
        members = self.members()
        if name not in members:
            raise _RefusedError("there is no array of this name")
        bodies = dict(self._messages(members[name]))
        if EXTERNAL_FILES in bodies:
            raise _RefusedError("its values lie in another file")
        if FILTERS in bodies:
            raise _RefusedError("its values are compressed; write it without filters")
        if not {DATASPACE, DATATYPE, LAYOUT} <= bodies.keys():
            raise _RefusedError("it is no array")
        dtype, shape = _dtype(bodies[DATATYPE]), _shape(bodies[DATASPACE])
        return StoredArray(self._place(bodies[LAYOUT], dtype, shape), dtype, shape)

    def _piece(self, offset: int, size: int) -> bytes:
        self._left -= 1
        if self._left < 0 or size > MAX_PIECE_BYTES:
            raise _RefusedError("the file has more structure than a file of some arrays")
        if offset + size > self._size:
            raise _RefusedError("the file ends too early, or is damaged")
        self._file.seek(offset)
        return self._file.read(size)

    def _at_most(self, offset: int, size: int) -> bytes:
        """As `_piece`, or less at the end of the file."""
        return self._piece(offset, max(0, min(size, self._size - offset)))

    # --- groups ---

    def _root(self) -> int:
        """Offset of the header of the root group."""
        start = self._at_most(0, 96)
        if not start.startswith(SIGNATURE) or len(start) < 48:
            raise _RefusedError("it is not an HDF5 file")
        version = start[8]
        if version in (0, 1):
            sizes, base, root = start[13:15], 24 + 4 * version, 64 + 4 * version
        elif version in (2, 3):
            sizes, base, root = start[9:11], 12, 36
        else:
            raise _RefusedError(f"its format has version {version}")
        if sizes != b"\x08\x08" or _u64(start, base) != 0:
            raise _RefusedError("its offsets do not take 8 bytes, or do not count from its start")
        return _u64(start, root)

    def _members(self, group: int) -> Iterator[tuple[str, int]]:
        """Names and headers of what is in a group itself; links to elsewhere are left out."""
        for kind, body in self._messages(group):
            if kind == LINK:
                yield from _link(body)
            elif kind == SYMBOL_TABLE:
                tree, heap = struct.unpack_from("<QQ", body)
                yield from self._table(tree, self._names(heap))
            elif kind == LINK_INFO and _u64(body, 2 + 8 * (body[1] & 1)) != NOWHERE:
                raise _RefusedError(
                    "its names are in a heap of another kind; write it with libver='earliest'"
                )

    def _names(self, heap: int) -> bytes:
        head = self._piece(heap, 32)
        if not head.startswith(b"HEAP\0"):
            raise _RefusedError("the file is damaged: no heap of names")
        return self._piece(_u64(head, 24), _u64(head, 8))

    def _table(self, node: int, names: bytes, above: int = 256) -> Iterator[tuple[str, int]]:
        """Members in a tree below a node; `above` is the level of the node above it."""
        head = self._piece(node, 24)
        kind, level, count = head[4], head[5], struct.unpack_from("<H", head, 6)[0]
        if not head.startswith(b"TREE") or kind != 0 or level >= above:
            raise _RefusedError("the file is damaged: no tree of names")
        body = self._piece(node + 24, 16 * count)
        for child in struct.unpack(f"<{2 * count}Q", body)[1::2]:
            if level:
                yield from self._table(child, names, level)
            else:
                yield from self._leaf(child, names)

    def _leaf(self, node: int, names: bytes) -> Iterator[tuple[str, int]]:
        head = self._piece(node, 8)
        if not head.startswith(b"SNOD"):
            raise _RefusedError("the file is damaged: no node of names")
        count = struct.unpack_from("<H", head, 6)[0]
        for entry in struct.iter_unpack("<QQI20x", self._piece(node + 8, 40 * count)):
            place, header, cached = entry
            if cached != 2:  # 2 is a soft link
                yield _text(names[place : names.find(b"\0", place)]), header

    # --- objects ---

    def _messages(self, header: int) -> Iterator[tuple[int, bytes]]:
        """Type and body of each message of an object."""
        start = self._at_most(header, 40)
        if start.startswith(b"OHDR\2"):
            yield from self._new_messages(header, start)
        elif start[:1] == b"\1":
            yield from self._old_messages(header, start)
        else:
            raise _RefusedError("the file is damaged: no header of an object")

    def _old_messages(self, header: int, start: bytes) -> Iterator[tuple[int, bytes]]:
        blocks = [(header + 16, struct.unpack_from("<I", start, 8)[0])]
        for offset, size in blocks:
            data, place = self._piece(offset, size), 0
            while place + 8 <= len(data):
                kind, length, flags = struct.unpack_from("<HHB", data, place)
                body = _body(kind, flags, data, place + 8, length)
                if kind == CONTINUATION:
                    blocks.append(struct.unpack_from("<QQ", body))
                yield kind, body
                place += 8 + length

    def _new_messages(self, header: int, start: bytes) -> Iterator[tuple[int, bytes]]:
        flags = start[5]
        begin = 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
        width = 1 << (flags & 3)
        size = int.from_bytes(start[begin : begin + width], "little")
        order = 2 * (flags >> 2 & 1)
        blocks = [(header + begin + width, size)]
        for offset, length in blocks:
            data, place = self._piece(offset, length), 0
            while place + 4 + order <= len(data):
                kind, length, flags = struct.unpack_from("<BHB", data, place)
                body = _body(kind, flags, data, place + 4 + order, length)
                if kind == CONTINUATION:
                    more, length_of_more = struct.unpack_from("<QQ", body)
                    blocks.append((more + 4, length_of_more - 8))  # without "OCHK" and checksum
                yield kind, body
                place += 4 + order + length

    def _place(self, layout: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
        """Offset of the values."""
        version, kind = layout[0], layout[1]
        if version not in (3, 4, 5) or kind != CONTIGUOUS:
            raise _RefusedError("its values do not lie in one piece; write it without chunks")
        offset, size = struct.unpack_from("<QQ", layout, 2)
        wanted = math.prod(shape) * dtype.itemsize
        if not wanted:
            if max(shape) > MOST_COLUMNS:
                raise _RefusedError(f"it is empty, of shape {shape}")
            return 0
        if size != wanted or offset == NOWHERE or offset + size > self._size:
            raise _RefusedError(
                f"{wanted} bytes of {shape} are not in the file, which has {self._size}"
            )
        return int(offset)


def _body(kind: int, flags: int, data: bytes, begin: int, length: int) -> bytes:
    if begin + length > len(data):
        raise _RefusedError("the file is damaged: a message is cut short")
    if flags & SHARED and kind in (DATASPACE, DATATYPE, LAYOUT, LINK, SYMBOL_TABLE):
        raise _RefusedError("its type or shape lies elsewhere in the file")
    return data[begin : begin + length]


def _link(body: bytes) -> Iterator[tuple[str, int]]:
    """The member that a message "link" names; nothing for a link to elsewhere."""
    flags, place = body[1], 2
    kind = HARD
    if flags & 8:
        kind, place = body[place], place + 1
    place += 8 * (flags >> 2 & 1) + (flags >> 4 & 1)
    width = 1 << (flags & 3)
    length = int.from_bytes(body[place : place + width], "little")
    name = body[place + width : place + width + length]
    if kind == HARD:
        yield _text(name), _u64(body, place + width + length)


def _shape(body: bytes) -> tuple[int, ...]:
    version, dimensions = body[0], body[1]
    begin = {1: 8, 2: 4}.get(version)
    if begin is None or dimensions > MOST_DIMENSIONS:
        raise _RefusedError("its shape is written in an unknown way")
    if version == 2 and body[3] != 1:
        raise _RefusedError("it is a single value")
    return struct.unpack_from(f"<{dimensions}Q", body, begin)


def _dtype(body: bytes) -> np.dtype[Any]:
    version = body[0] & 0xF0
    for encoded, name in DTYPES.items():
        if body[: len(encoded)] == bytes([encoded[0] | version]) + encoded[1:]:
            return np.dtype(name)
    raise _RefusedError("its type is none of u32, u64, i64 and f32, little-endian")


def _u64(data: bytes, place: int) -> int:
    (number,) = struct.unpack("<Q", data[place : place + 8])  # at any place, however large
    return int(number)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
