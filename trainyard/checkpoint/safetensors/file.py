"""Safetensors files as torch tensors: a streaming writer, a ranged reader. Format: `header`.

The safetensors package reads and writes the same bytes, but needs a local file and all tensors in
memory at once. This module works with any store and keeps one tensor in memory, or a part of one
that is on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from trainyard.artifacts import store
from trainyard.artifacts.digest import Both
from trainyard.checkpoint.safetensors.blocks import BlockDigests, Digests
from trainyard.checkpoint.safetensors.header import (
    TensorSpec,
    encode_header,
    file_order,
)
from trainyard.checkpoint.safetensors.joined import FilePiece, Joined
from trainyard.checkpoint.safetensors.ranges import BoxPart, Read, Want, plan_reads
from trainyard.checkpoint.safetensors.shard import READ_BYTES, ShardFile, in_threads, num_threads

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
"""torch's types, by their names in safetensors headers."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

LOCAL_GAP_BYTES = 64 << 10
"""Bytes between two boxes that are cheaper to read than to skip, on a file system."""

REMOTE_GAP_BYTES = 256 << 10
"""The gap for an object store, where a request takes milliseconds."""

STAGED_BYTES = 4 << 20
"""Page-locked memory through which a GPU's tensors reach a file, for each file that is written. A
copy of so many bytes takes 0.1 ms, and stays in the CPU's cache for the next reader."""


class Sink(Protocol):
    """A file for `write_tensors`."""

    def write(self, data: Any, /) -> Any:
        """Append bytes."""


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Type and shape of a tensor."""
    return TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


# --- writing ----------------------------------------------------------------------------------


def write_tensors(
    out: Sink,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], torch.Tensor | FilePiece],
    metadata: Mapping[str, str] | None = None,
    *,
    with_digests: bool = False,
) -> Digests:
    """Write a file of the tensors `specs`; `read` returns one at a time, or for an `OutputFile`
    what gives its bytes. Returns the digests of their blocks, if asked for them.

    Equal specs and values give equal bytes, in any order of the mapping."""
    order = file_order(specs)
    header = encode_header({name: specs[name] for name in order}, metadata)
    values = _values(order, specs, read)
    pieces: Iterator[memoryview | FilePiece] = chain([memoryview(header)], values)
    digests = BlockDigests(len(header), {name: specs[name] for name in order})
    if isinstance(out, store.OutputFile):
        size = len(header) + sum(spec.size_bytes for spec in specs.values())
        if with_digests:
            out.digest = Both(out.digest, digests)
        out.append_filled(size, Joined(pieces).fill)
        return digests.by_key
    for piece in pieces:
        assert isinstance(piece, memoryview)
        digests.update(piece)
        out.write(piece)
    return digests.by_key


def _values(
    order: Iterable[str],
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], torch.Tensor | FilePiece],
) -> Iterator[memoryview | FilePiece]:
    """The bytes of each tensor in turn, in pieces that are valid until the next; each tensor is
    freed before the next is read."""
    for name in order:
        tensor = read(name)
        if not isinstance(tensor, torch.Tensor):
            assert len(tensor) == specs[name].size_bytes, name
            yield tensor
            continue
        found = spec_of(tensor)
        assert found == specs[name], f"{name}: {found} is not {specs[name]}"
        if tensor.numel():
            chunks = tensor_chunks(tensor)
            del tensor
            yield from chunks


def tensor_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The values of a tensor on any device in C order, as host memory that is valid until the next
    chunk. Of one on a GPU there are STAGED_BYTES at a time."""
    if tensor.is_cuda and tensor.is_contiguous():
        staging = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=True)  # torch keeps it
        yield from staged(tensor, staging)
        return
    data = tensor_bytes(tensor)
    del tensor
    yield data


def staged(tensor: torch.Tensor, staging: torch.Tensor) -> Iterator[memoryview]:
    """The values of a contiguous tensor, through uint8 memory on the host of any length."""
    values = tensor.detach().reshape(-1).view(torch.uint8)
    for part in values.split(len(staging)):
        chunk = staging[: len(part)]
        chunk.copy_(part)
        yield memoryview(chunk.numpy().data)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor on any device as contiguous memory, in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


# --- reading ----------------------------------------------------------------------------------


class TensorFile(ShardFile):
    """A file whose tensors are read whole, or by boxes of several at once."""

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        shape = self.extents[key].spec.shape
        return self.read_slice(key, (0,) * len(shape), shape)

    def read_slice(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A copy of the box of a tensor at `offset` with `shape`."""
        spec = self.extents[key].spec
        assert len(offset) == len(shape) == len(spec.shape), (key, offset, shape, spec)
        box = torch.empty(tuple(shape), dtype=DTYPES[spec.dtype])
        for read in self.plan([self.want(key, offset, box)]):
            self.fetch(read)
        return box

    # --- plans --------------------------------------------------------------------------------

    def want(self, key: str, offset: Sequence[int], target: torch.Tensor) -> Want[torch.Tensor]:
        """The box at `offset` that fills `target`."""
        extent, shape = self.extents[key], tuple(target.shape)
        sides = zip(offset, shape, extent.spec.shape, strict=True)
        assert all(0 <= o <= o + n <= f for o, n, f in sides), (key, offset, shape, extent)
        return Want(extent, tuple(offset), shape, target.detach())

    def plan(self, wants: Sequence[Want[Any]], read_bytes: int | None = None) -> list[Read[Any]]:
        """How to read some boxes (see `ranges`); `read_bytes` at once, or READ_BYTES."""
        gap_bytes = LOCAL_GAP_BYTES if self.is_local else REMOTE_GAP_BYTES
        return plan_reads(wants, read_bytes or READ_BYTES, gap_bytes)

    def fetch(self, read: Read[torch.Tensor], scratch: torch.Tensor | None = None) -> None:
        """Carry out a planned read and fill its targets.

        scratch: optional uint8 memory for it, at least as long as the read."""
        if len(read.parts) == 1:
            straight = _memory_of(read.parts[0])
            if straight is not None:
                self.read_into(read.begin, straight)
                return
        data = self.load(read, scratch)
        for part in read.parts:
            _target(part).copy_(values_in(data, read, part))

    def load(self, read: Read[Any], scratch: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of a planned read."""
        length = read.end - read.begin
        data = torch.empty(length, dtype=torch.uint8) if scratch is None else scratch[:length]
        self.read_into(read.begin, memoryview(data.numpy().data))
        return data


def box_of(memory: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A view of the box of a tensor at `offset` with `shape`."""
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        memory = memory.narrow(dim, begin, length)
    return memory


def _target(part: BoxPart[torch.Tensor]) -> torch.Tensor:
    return box_of(part.want.target, part.local, part.shape)


def values_in(data: torch.Tensor, read: Read[Any], part: BoxPart[Any]) -> torch.Tensor:
    """The elements of a part in the bytes that were read; a view if alignment allows it."""
    flat = data[part.begin - read.begin : part.end - read.begin]
    if flat.data_ptr() % part.itemsize or flat.storage_offset() % part.itemsize:
        flat = flat.clone()
    values = flat.view(DTYPES[part.want.extent.spec.dtype])
    return values.as_strided(part.shape, part.strides, values.storage_offset())


def _memory_of(part: BoxPart[torch.Tensor]) -> memoryview | None:
    """The target memory of a part, if the file's bytes can be read directly into it."""
    target = _target(part)
    is_same = target.dtype == DTYPES[part.want.extent.spec.dtype] and target.device.type == "cpu"
    if not (is_same and part.is_one_run and target.is_contiguous()):
        return None
    return memoryview(target.reshape(-1).view(torch.uint8).numpy().data)


# --- several files ----------------------------------------------------------------------------


def fetch_all(plans: Sequence[tuple[TensorFile, Sequence[Read[torch.Tensor]]]]) -> int:
    """Carry out reads that fill disjoint memory; returns the bytes read.

    Each thread has one buffer of a read's size, regardless of the size of the load."""
    reads = [(file, read) for file, of_file in plans for read in of_file]
    size = sum(read.end - read.begin for _, read in reads)
    if size <= READ_BYTES:
        for file, read in reads:
            file.fetch(read)
        return size
    own = threading.local()

    def fetch(job: tuple[TensorFile, Read[torch.Tensor]]) -> None:
        file, read = job
        if not hasattr(own, "scratch"):
            own.scratch = torch.empty(READ_BYTES, dtype=torch.uint8)
        file.fetch(read, own.scratch)

    for _ in in_threads(fetch, reads, num_threads(file for file, _ in plans)):
        pass
    return size
