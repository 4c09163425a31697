"""The header of a safetensors file: types, shapes, offsets. Headers are untrusted input.

8 bytes   little-endian unsigned: length n of the header
n bytes   JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}},
          padded with spaces to a multiple of 8; offsets count from the end of the header
the rest  tensors, little-endian, C order, without gaps: by type, as listed below, then by name"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts.strict_json import MAX_COUNT, counts, parse_json, shown
from trainyard.errors import ArtifactError

ITEM_BYTES = {
    "I64": 8,
    "F64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Types by their names in safetensors headers, in the order in which a file holds them, and the
bytes of an element. `file.DTYPES` has torch's types."""

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors package: a longer header is an attack or a mistake."""

MAX_TENSORS = 250_000
"""Limit for a file, or for a model in several. Kimi-K2 in FP8, with 384 experts in each of 60
layers, has about 140,000. A million, which MAX_HEADER_BYTES would allow, take 15 s and 1.4 GB to
check."""

PREFIX_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor, without its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def text(self) -> str:
        """The form in messages."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor's description, and the byte of the file at which its values start."""

    spec: TensorSpec
    begin: int


def fault_of_spec(spec: TensorSpec) -> str | None:
    """Why no tensor can have this type and shape; None if one can."""
    if spec.dtype not in ITEM_BYTES:
        return f"dtype {shown(spec.dtype)} is not one of {', '.join(ITEM_BYTES)}"
    # torch multiplies sizes in 64 bits, even if one dim is empty.
    if math.prod(max(1, size) for size in spec.shape) > MAX_COUNT // 16:
        return f"a tensor of {shown(list(spec.shape))} is larger than any memory"
    return None


def file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The order in which a file holds its tensors: by type, then by name."""
    rank = {dtype: index for index, dtype in enumerate(ITEM_BYTES)}
    return sorted(specs, key=lambda name: (rank[specs[name].dtype], name))


def encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """Length and header of a file with these tensors in order."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.size_bytes
        offsets = {"data_offsets": [begin, end]}
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), **offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX_BYTES)
    return struct.pack("<Q", len(text)) + text


def header_length(prefix: bytes, size: int, url: str) -> int:
    """Size of the header, from the first 8 bytes of a file of `size`. Raises ArtifactError."""
    if len(prefix) < PREFIX_BYTES:
        raise ArtifactError(f"{url}: {size} bytes, too short for safetensors; it is truncated")
    length = int(struct.unpack("<Q", prefix)[0])
    pickle = " but a pickle or an archive, which is never read" if _is_pickle(prefix) else ""
    if length > MAX_HEADER_BYTES or (pickle and PREFIX_BYTES + length > size):
        raise ArtifactError(
            f"{url}: header of {length} bytes, the limit is {MAX_HEADER_BYTES}; not "
            f"safetensors{pickle}"
        )
    if PREFIX_BYTES + length > size:
        raise ArtifactError(f"{url}: header of {length} bytes in a file of {size}; it is truncated")
    return length


def _is_pickle(prefix: bytes) -> bool:
    is_archive = prefix.startswith(b"PK\x03\x04")  # as torch.save writes
    return is_archive or (prefix[0] == 0x80 and 2 <= prefix[1] <= 5)


def parse_header(text: bytes, size: int, url: str) -> tuple[dict[str, Extent], dict[str, str]]:
    """The tensors and metadata of a file of `size` bytes, from the text of its header.

    Raises ArtifactError unless the tensors fill the rest of the file without a gap."""
    _check_number(text, url)
    data_begin = PREFIX_BYTES + len(text)
    try:
        header = parse_json(text, url)
        metadata = _strings(header.pop("__metadata__", {}))
        extents = {name: _extent(entry, data_begin) for name, entry in header.items()}
    except ArtifactError as error:
        raise ArtifactError(f"{url}: the header is not well-formed: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{url}: the header is not well-formed: {shown(error)}") from error
    _check_gapless(extents, data_begin, size, url)
    return extents, metadata


def _check_number(text: bytes, url: str) -> None:
    """Refuse too many tensors before a parser builds a table for each."""
    num_tables = text.count(b"{")  # or more, if a name has a brace
    if num_tables > MAX_TENSORS + 2:  # the header itself, and __metadata__
        raise ArtifactError(
            f"{url}: the header has {num_tables} tables, one for each tensor; {MAX_TENSORS} "
            "tensors are read at most"
        )
    num_keys = text.count(b":")  # four of each tensor, with its name
    if num_keys > 5 * MAX_TENSORS:
        raise ArtifactError(
            f"{url}: the header has {num_keys} keys, more than {MAX_TENSORS} tensors have"
        )


def _strings(table: Any) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise ValueError("__metadata__ is not a table of strings")
    return table


def _extent(entry: Any, data_begin: int) -> Extent:
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {shown(dtype)}")
    try:
        shape, (begin, end) = counts(entry["shape"]), counts(entry["data_offsets"])
    except ValueError as error:
        raise ValueError(f"shape or offsets are not counts: {error}") from error
    spec = TensorSpec(dtype, shape)
    fault = fault_of_spec(spec)
    if fault is not None:
        raise ValueError(fault)
    if end - begin != spec.size_bytes:
        raise ValueError(f"{spec.text} takes {spec.size_bytes} bytes, not {end - begin}")
    return Extent(spec, data_begin + begin)


def _check_gapless(extents: Mapping[str, Extent], begin: int, size: int, url: str) -> None:
    order = sorted(extents.items(), key=lambda item: (item[1].begin, item[1].spec.size_bytes))
    for name, extent in order:
        if extent.begin != begin:
            raise ArtifactError(
                f"{url}: tensor {shown(name)} at byte {extent.begin}, the one before ends at "
                f"{begin}"
            )
        begin += extent.spec.size_bytes
        if begin > size:
            raise ArtifactError(
                f"{url}: tensor {shown(name)} ends at byte {begin}, the file at {size}; it is "
                "truncated"
            )
    if begin != size:
        raise ArtifactError(f"{url}: {size - begin} bytes follow the last tensor; it is damaged")
