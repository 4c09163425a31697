"""One safetensors file: its layout, a streaming writer, a ranged reader.

    8 bytes   little-endian unsigned: length n of the header
    n bytes   JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}},
              padded with spaces to a multiple of 8; offsets count from the end of the header
    the rest  tensors, little-endian, C order, without gaps: by type, as listed below, then by name

The safetensors package reads and writes the same bytes, yet wants a local file and all of its
tensors in memory at once. Here one tensor at a time passes through, to and from any store. Headers
are not trusted."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import torch

from trainyard.artifacts import store
from trainyard.errors import ArtifactError

DTYPES: dict[str, torch.dtype] = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of types in safetensors headers, in the order in which a file holds them."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors package: a longer header is an attack or a mistake."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor, without its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def text(self) -> str:
        """As messages write it."""
        return f"{self.dtype} {list(self.shape)}"

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        return TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


class Sink(Protocol):
    """What `write_tensors` needs of a file."""

    def write(self, data: Any, /) -> Any:
        """Append bytes."""


# --- writing ----------------------------------------------------------------------------------


def write_tensors(
    out: Sink,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file of the tensors `specs`, asking `read` for one at a time.

    Equal specs and values give equal bytes, in whatever order the mapping lists them."""
    rank = {dtype: index for index, dtype in enumerate(DTYPES)}
    order = sorted(specs, key=lambda name: (rank[specs[name].dtype], name))
    out.write(_encode_header({name: specs[name] for name in order}, metadata))
    for name in order:
        tensor = read(name)
        found = TensorSpec.of(tensor)
        assert found == specs[name], f"{name}: {found} is not {specs[name]}"
        if tensor.numel():
            out.write(tensor_bytes(tensor))


def _encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.size_bytes
        place = {"data_offsets": [begin, end]}
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), **place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor on any device as one piece of memory, in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the values of one tensor lie in its file."""

    spec: TensorSpec
    begin: int


class TensorFile:
    """A safetensors file opened for reading by range.

    A local file is mapped, so only the pages that are used are read; of a remote one the rows that
    hold the slice are fetched. Raises ArtifactError for a file that is torn or hostile."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._file: BinaryIO = store.open_input(url)
        self._map: mmap.mmap | None = None
        try:
            size = self._file.seek(0, 2)
            self.extents, self.metadata = read_header(self._file, size, url)
            if store.is_local(url):
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except BaseException:
            self._file.close()
            raise

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        shape = self.extents[key].spec.shape
        return self.read_slice(key, (0,) * len(shape), shape)

    def read_slice(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The box of a tensor that begins at `offset` and has `shape`, in memory of its own."""
        extent = self.extents[key]
        full, dtype = extent.spec.shape, DTYPES[extent.spec.dtype]
        assert len(offset) == len(shape) == len(full), (key, offset, shape, full)
        ends = [o + s for o, s in zip(offset, shape, strict=True)]
        assert min(offset, default=0) >= 0, (key, offset)
        assert all(e <= f for e, f in zip(ends, full, strict=True)), (key, offset, shape, full)
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        first, count = (offset[0], shape[0]) if full else (0, 1)
        row_bytes = math.prod(full[1:]) * dtype.itemsize
        data = self._range(extent.begin + first * row_bytes, count * row_bytes)
        box = torch.frombuffer(data, dtype=dtype).view(count, *full[1:])
        for dim in range(1, len(full)):
            box = box.narrow(dim, offset[dim], shape[dim])
        return box.reshape(tuple(shape)).clone(memory_format=torch.contiguous_format)

    def _range(self, begin: int, length: int) -> bytearray | memoryview:
        if self._map is not None:
            return memoryview(self._map)[begin : begin + length]
        self._file.seek(begin)
        data = bytearray(length)
        done = 0
        while done < length:
            piece = self._file.read(length - done)
            if not piece:
                raise ArtifactError(f"{self.url}: ends at byte {begin + done}; it is truncated")
            data[done : done + len(piece)] = piece
            done += len(piece)
        return data

    def close(self) -> None:
        """Let the file go; tensors that were read stay."""
        if self._map is not None:
            self._map.close()
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_header(file: BinaryIO, size: int, url: str) -> tuple[dict[str, Extent], dict[str, str]]:
    """The tensors of a safetensors file and its metadata, checked against its size in bytes."""
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ArtifactError(f"{url}: {size} bytes, too short for safetensors; it is truncated")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise ArtifactError(
            f"{url}: header of {length} bytes, over {MAX_HEADER_BYTES}; not safetensors"
        )
    if 8 + length > size:
        raise ArtifactError(f"{url}: header of {length} bytes in a file of {size}; it is truncated")
    try:
        header = json.loads(file.read(length))
        metadata = dict(header.pop("__metadata__", {}))
        extents = {name: _extent(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{url}: the header is not well-formed: {error!r}") from error
    _check_gapless(extents, 8 + length, size, url)
    return extents, metadata


def _extent(entry: Any, data_begin: int) -> Extent:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"shape {shape} or offsets {[begin, end]} are not counts")
    spec = TensorSpec(dtype, tuple(shape))
    if end - begin != spec.size_bytes:
        raise ValueError(f"{dtype} {shape} takes {spec.size_bytes} bytes, not {end - begin}")
    return Extent(spec, data_begin + begin)


def _check_gapless(extents: Mapping[str, Extent], begin: int, size: int, url: str) -> None:
    order = sorted(extents.items(), key=lambda item: (item[1].begin, item[1].spec.size_bytes))
    for name, extent in order:
        if extent.begin != begin:
            raise ArtifactError(
                f"{url}: tensor {name!r} at byte {extent.begin}, the one before ends at {begin}"
            )
        begin += extent.spec.size_bytes
        if begin > size:
            raise ArtifactError(
                f"{url}: tensor {name!r} ends at byte {begin}, the file at {size}; it is truncated"
            )
    if begin != size:
        raise ArtifactError(f"{url}: {size - begin} bytes follow the last tensor; it is damaged")
