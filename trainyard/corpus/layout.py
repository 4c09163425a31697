"""The layout of Megatron-LM's token files: a flat PREFIX.bin, and its index, PREFIX.idx.

The .bin contains only tokens. The .idx, little endian:

    bytes   type    field
    9       bytes   magic "MMIDIDX\\0\\0"
    8       u64     version, 1
    1       u8      dtype code, see DTYPES
    8       u64     S, the number of sequences
    8       u64     D, the number of document bounds (documents + 1)
    4 * S   i32     length of each sequence in tokens
    8 * S   i64     byte offset of each sequence in the .bin
    8 * D   i64     sequence index at each document bound, the first 0
    1 * S   i8      mode of each sequence (0 text, 1 image): only multimodal files, known by size

Pure functions of arrays and bytes; knows nothing of stores, text or tokenizers."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainyard.errors import ArtifactError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""Type of a token by its code in the header."""

CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
MAX_SEQUENCE_LENGTH = 2**31 - 1
CHUNK = 1 << 18
"""Index entries handled at a time: bounds the memory of computed arrays."""

Tokens = npt.NDArray[Any]


class ByteSink(Protocol):
    """Anything that takes bytes: an output of the store, a file, a BytesIO."""

    def write(self, data: bytes | memoryview, /) -> Any:
        """Take all of `data`."""


def optimal_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The type tokens are stored as: uint16 for a known vocabulary below 65500, else int32."""
    small = vocab_size is not None and vocab_size < 65500
    return np.dtype(np.uint16 if small else np.int32)


# --- writing ----------------------------------------------------------------------------------


def write_header(out: ByteSink, dtype: np.dtype[Any], num_sequences: int, num_bounds: int) -> None:
    """The first 34 bytes of an .idx."""
    out.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], num_sequences, num_bounds))


def write_array(out: ByteSink, values: Tokens, dtype: str, shift: int = 0, first: int = 0) -> None:
    """`values + shift` from entry `first` on, as `dtype`, a chunk at a time."""
    for start in range(first, len(values), CHUNK):
        chunk = values[start : start + CHUNK].astype(dtype)
        out.write((chunk + chunk.dtype.type(shift) if shift else chunk).tobytes())


def write_offsets(
    out: ByteSink, lengths: npt.NDArray[np.int32], itemsize: int, base: int = 0
) -> int:
    """Byte offsets of sequences laid end to end from `base`; returns where the last one ends."""
    for start in range(0, len(lengths), CHUNK):
        offsets, base = _offsets(lengths[start : start + CHUNK], itemsize, base)
        out.write(offsets.astype("<i8", copy=False).tobytes())
    return base


def _offsets(
    lengths: npt.NDArray[np.int32], itemsize: int, base: int
) -> tuple[npt.NDArray[np.int64], int]:
    bounds = np.empty(len(lengths) + 1, dtype=np.int64)
    bounds[0] = base
    np.cumsum(lengths, dtype=np.int64, out=bounds[1:])
    bounds[1:] *= itemsize
    bounds[1:] += base
    return bounds[:-1], int(bounds[-1])


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of an .idx. The arrays are views of the file, not copies."""

    dtype: np.dtype[Any]
    sequence_lengths: npt.NDArray[np.int32]
    """(S,) tokens of each sequence."""
    sequence_offsets: npt.NDArray[np.int64]
    """(S,) byte offset of each sequence in the .bin."""
    document_indices: npt.NDArray[np.int64]
    """(D,) sequence index at each document bound: document d is sequences [d] up to [d + 1]."""
    modes: npt.NDArray[np.int8] | None
    """(S,) 0 text, 1 image; None for a file of text alone."""

    @property
    def bin_bytes(self) -> int:
        """The size that the .bin must have."""
        if not len(self.sequence_lengths):
            return 0
        return int(self.sequence_offsets[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize


def parse_index(raw: npt.NDArray[np.uint8], name: str) -> Index:
    """The index in the bytes of an .idx. name: names the file in messages.

    Checks the header, the size and the outermost bounds; `verify_index` reads the rest."""

    def view(start: int, count: int, dtype: str) -> Tokens:
        return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    return index_of(raw[: HEADER.size].tobytes(), len(raw), view, name)


def index_of(
    header: bytes, size_bytes: int, view: Callable[[int, int, str], Any], name: str
) -> Index:
    """The index of a file that is not in memory.

    header: its first bytes. view: makes an array of (first byte, number of entries, type); anything
    with `len` and slices suffices if the index is only read in order. name: for messages."""
    dtype, num_sequences, num_bounds = _parse_header(header, name)
    size = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_bounds < 1 or size_bytes not in (size, size + num_sequences):
        raise ArtifactError(
            f"{name} is {size_bytes} bytes, but its header ({num_sequences} sequences, "
            f"{num_bounds} document bounds) requires {size}, or {size + num_sequences} with modes: "
            "truncated or overwritten"
        )
    lengths = view(HEADER.size, num_sequences, "<i4")
    offsets = view(HEADER.size + 4 * num_sequences, num_sequences, "<i8")
    documents = view(HEADER.size + 12 * num_sequences, num_bounds, "<i8")
    modes = view(size, num_sequences, "i1") if size_bytes > size else None
    if documents[0] != 0 or documents[-1] != num_sequences:
        raise ArtifactError(
            f"{name}: document bounds run from {documents[0]} to {documents[-1]}, "
            f"not from 0 to {num_sequences}"
        )
    return Index(dtype, lengths, offsets, documents, modes)


def _parse_header(raw: bytes, name: str) -> tuple[np.dtype[Any], int, int]:
    if len(raw) < HEADER.size:
        raise ArtifactError(
            f"{name} is {len(raw)} bytes, less than the {HEADER.size} of an .idx header"
        )
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(raw[: HEADER.size])
    if magic != MAGIC:
        raise ArtifactError(
            f"{name} begins with {magic!r}, not {MAGIC!r}: not a Megatron .idx file"
        )
    if version != VERSION:
        raise ArtifactError(
            f"{name} has format version {version}; this reader knows version {VERSION}"
        )
    if code not in DTYPES:
        raise ArtifactError(f"{name} has dtype code {code}; known codes are 1 to {max(DTYPES)}")
    return np.dtype(DTYPES[code]), num_sequences, num_bounds


def check_bin_size(index: Index, bin_bytes: int, prefix: str) -> None:
    """Refuse a .bin whose size differs from that in its .idx, which passed `verify_index`."""
    if bin_bytes == index.bin_bytes:
        return
    where = "after the last sequence"
    if bin_bytes < index.bin_bytes:
        first = bisect.bisect_right(index.sequence_offsets, bin_bytes) - 1
        where = f"from sequence {first} on"
    raise ArtifactError(
        f"{prefix}.bin is {bin_bytes} bytes, but by {prefix}.idx it has {index.bin_bytes} (they "
        f"differ {where}): one of the two is truncated or from another run; make the pair again"
    )


def verify_index(index: Index, name: str) -> None:
    """Check every entry: sequences must be contiguous from 0, document bounds must ascend."""
    base = 0
    for start in range(0, len(index.sequence_lengths), CHUNK):
        lengths = index.sequence_lengths[start : start + CHUNK]
        stored = index.sequence_offsets[start : start + CHUNK]
        offsets, base = _offsets(lengths, index.dtype.itemsize, base)
        bad = np.flatnonzero((offsets != stored) | (lengths < 0))
        if len(bad):
            raise ArtifactError(
                f"{name}: sequence {start + bad[0]} does not begin where the one before it ends; "
                "the index is damaged, make the pair again"
            )
    for start in range(0, len(index.document_indices) - 1, CHUNK):
        bounds = index.document_indices[start : start + CHUNK + 1]
        falls = np.flatnonzero(bounds[1:] < bounds[:-1])  # a difference may not fit 64 bits
        if len(falls):
            raise ArtifactError(f"{name}: document {start + falls[0]} ends before it begins")
