"""The layout of PREFIX.docs, the sidecar with the origin of every document.

The file, little endian; document k of the .idx is record k here:

    bytes          type    field
    8              bytes   magic "TYDOCS\\0\\0"
    4              u32     version, 1
    4              u32     flags; bit 0: there are ids
    8              u64     D, the number of documents
    8              u64     S, the number of sources
    8              u64     N, bytes of the names of the sources
    8              u64     I, bytes of the ids
    16             u64 x2  zero
    24 * D         record  where the document lies, see below
    8 * (S + 1)    u64     bounds of the names: source s is bytes [s] up to [s + 1] of what follows
    N              bytes   the names of the sources, UTF-8
    8 * (D + 1)    u64     bounds of the ids, if flag bit 0 is set
    I              bytes   the ids, UTF-8; of a document without one, nothing

A record:

    8              u64     byte offset in the source after decompression; Parquet: of the row group
    8              u64     line number from 1; Parquet: row number
    8              u64     number of the source << 40 | length in bytes (Parquet: of the row group)

A source is the URL of an input file. Sizes, bounds and names are checked before they are used. Pure
functions of bytes; knows nothing of stores."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainyard.corpus.layout import CHUNK, ByteSink
from trainyard.errors import ArtifactError

MAGIC = b"TYDOCS\x00\x00"
VERSION = 1
HAS_IDS = 1
HEADER = struct.Struct("<8sIIQQQQQQ")
RECORD = np.dtype([("offset", "<u8"), ("line", "<u8"), ("where", "<u8")])
LENGTH_BITS = 40
MAX_LENGTH = (1 << LENGTH_BITS) - 1
MAX_SOURCES = 1 << (64 - LENGTH_BITS)

Array = npt.NDArray[Any]


class Header(NamedTuple):
    """The first 64 bytes."""

    has_ids: bool
    num_documents: int
    num_sources: int
    name_bytes: int
    id_bytes: int

    def pack(self) -> bytes:
        """The header as bytes."""
        return HEADER.pack(MAGIC, VERSION, HAS_IDS * self.has_ids, *self[1:], 0, 0)

    def starts(self) -> tuple[int, int, int, int, int]:
        """Where the bounds of names, the names, the bounds of ids, the ids and the end are."""
        bounds = HEADER.size + RECORD.itemsize * self.num_documents
        names = bounds + 8 * (self.num_sources + 1)
        id_bounds = names + self.name_bytes
        ids = id_bounds + 8 * (self.num_documents + 1) * self.has_ids
        return bounds, names, id_bounds, ids, ids + self.id_bytes


def parse_header(data: bytes, size_bytes: int, name: str) -> Header:
    """The header of a file of `size_bytes`; ArtifactError if it is invalid or the sizes
    disagree."""
    if len(data) < HEADER.size:
        raise ArtifactError(
            f"{name} is {size_bytes} bytes, less than the {HEADER.size} of a .docs header"
        )
    magic, version, flags, *counts, zero, zero2 = HEADER.unpack(data[: HEADER.size])
    if magic != MAGIC:
        raise ArtifactError(f"{name} begins with {magic!r}, not {MAGIC!r}: not a .docs sidecar")
    if version != VERSION:
        raise ArtifactError(
            f"{name} has format version {version}; this reader knows version {VERSION}"
        )
    header = Header(bool(flags & HAS_IDS), *counts)
    if flags > HAS_IDS or zero or zero2 or (header.id_bytes and not header.has_ids):
        raise ArtifactError(f"{name}: the header has fields that version {VERSION} does not have")
    if header.num_sources > MAX_SOURCES or header.starts()[-1] != size_bytes:
        raise ArtifactError(
            f"{name} is {size_bytes} bytes, but its header ({header.num_documents} documents, "
            f"{header.num_sources} sources) requires {header.starts()[-1]}: truncated or "
            "overwritten"
        )
    return header


def parse_names(bounds: Array, names: bytes, name: str) -> list[str]:
    """The names of the sources. name: names the file in messages."""
    check_bounds(bounds, 0, len(names), f"{name}: names of sources")
    if len(bounds) and (bounds[0] != 0 or bounds[-1] != len(names)):
        raise ArtifactError(f"{name}: the names of its sources do not fill their place: damaged")
    return [
        decode(names[a:b], f"{name}: source {s}")
        for s, (a, b) in enumerate(itertools.pairwise(bounds.tolist()))
    ]


def check_bounds(bounds: Array, low: int, high: int, what: str) -> None:
    """Refuse bounds that fall, or that leave [low, high]."""
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if len(falls):
        raise ArtifactError(f"{what}: number {falls[0]} ends before it begins: damaged")
    if len(bounds) and not low <= int(bounds[0]) <= int(bounds[-1]) <= high:
        raise ArtifactError(f"{what}: bounds from {bounds[0]} to {bounds[-1]} of {high}: damaged")


def check_records(records: Array, header: Header, first: int, name: str) -> None:
    """Refuse records of a source that does not exist. first: document of the first record."""
    bad = np.flatnonzero((records["where"] >> np.uint64(LENGTH_BITS)) >= header.num_sources)
    if len(bad):
        raise ArtifactError(
            f"{name}: document {first + bad[0]} names source "
            f"{int(records['where'][bad[0]]) >> LENGTH_BITS} of {header.num_sources}: damaged"
        )


def decode(data: bytes, what: str) -> str:
    """UTF-8 to text. what: names it in messages."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{what}: not UTF-8 ({error.reason}): damaged") from error


def write_names(names: Sequence[bytes], out: ByteSink) -> None:
    """Write the bounds of the names of sources, and the names."""
    bounds = np.cumsum([0, *map(len, names)])
    out.write(bounds.astype("<u8").tobytes())
    out.write(b"".join(names))


def write_repeated(value: int, count: int, out: ByteSink) -> None:
    """Write the same u64 many times: the bounds of missing ids."""
    for start in range(0, count, CHUNK):
        out.write(np.full(min(CHUNK, count - start), value, "<u8").tobytes())
