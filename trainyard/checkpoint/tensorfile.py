"""One safetensors file: a streaming writer, a ranged reader. What is in one: `header`.

The safetensors package reads and writes the same bytes, yet wants a local file and all of its
tensors in memory at once. Here one tensor at a time passes through, to and from any store."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from trainyard.artifacts import ahead, store
from trainyard.artifacts.digest import hasher
from trainyard.checkpoint.header import (
    DTYPE_NAMES,
    DTYPES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Extent,
    TensorSpec,
    encode_header,
    header_length,
    parse_header,
)
from trainyard.checkpoint.ranges import Part, Read, Want, plan_reads
from trainyard.errors import ArtifactError

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "MAX_HEADER_BYTES",
    "Extent",
    "TensorFile",
    "TensorSpec",
    "file_order",
    "tensor_bytes",
    "write_tensors",
]

READ_BYTES = 8 << 20
"""Bytes that are read at once, at most."""

LOCAL_GAP_BYTES = 64 << 10
"""Bytes between two boxes that cost less to read than to pass over: of a file system ..."""

REMOTE_GAP_BYTES = 256 << 10
"""... and of an object store, where a request costs milliseconds."""

FIRST_BYTES = 64 << 10
"""What is fetched of a remote file in the hope that the header ends there."""


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
    order = file_order(specs)
    out.write(encode_header({name: specs[name] for name in order}, metadata))
    for name in order:
        tensor = read(name)
        found = TensorSpec.of(tensor)
        assert found == specs[name], f"{name}: {found} is not {specs[name]}"
        if tensor.numel():
            out.write(tensor_bytes(tensor))


def file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The order in which a file holds its tensors: by type, then by name."""
    rank = {dtype: index for index, dtype in enumerate(DTYPES)}
    return sorted(specs, key=lambda name: (rank[specs[name].dtype], name))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor on any device as one piece of memory, in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


# --- reading ----------------------------------------------------------------------------------


class TensorFile:
    """A safetensors file opened for reading by range, from any number of threads.

    Raises ArtifactError for a file that is torn or hostile, and for one that changes meanwhile."""

    def __init__(self, url: str, expected_bytes: int | None = None) -> None:
        """expected_bytes: how long the file must be, by a manifest."""
        self.url = url
        self._path = store.local_path(url)
        found = store.info(url)
        self.size_bytes, self._version = found.size_bytes, found.version
        if expected_bytes not in (None, self.size_bytes):
            raise ArtifactError(
                f"{url}: {self.size_bytes} bytes, manifest.json says {expected_bytes}; the file is "
                "truncated or was replaced"
            )
        self._stamp = _stamp_of(self._path.stat()) if self._path is not None else None
        self.extents, self.metadata = self._header()

    @property
    def is_local(self) -> bool:
        """Whether reads are calls of the system, not requests."""
        return self._path is not None

    def _header(self) -> tuple[dict[str, Extent], dict[str, str]]:
        size = self.size_bytes
        first = bytearray(min(size, PREFIX_BYTES if self.is_local else FIRST_BYTES))
        self.read_into(0, memoryview(first))
        end = PREFIX_BYTES + header_length(bytes(first[:PREFIX_BYTES]), size, self.url)
        rest = bytearray(max(0, end - len(first)))
        self.read_into(len(first), memoryview(rest))
        return parse_header(bytes((first + rest)[PREFIX_BYTES:end]), size, self.url)

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        shape = self.extents[key].spec.shape
        return self.read_slice(key, (0,) * len(shape), shape)

    def read_slice(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The box of a tensor that begins at `offset` and has `shape`, in memory of its own."""
        spec = self.extents[key].spec
        assert len(offset) == len(shape) == len(spec.shape), (key, offset, shape, spec)
        box = torch.empty(tuple(shape), dtype=DTYPES[spec.dtype])
        for read in self.plan([self.want(key, offset, box)]):
            self.fetch(read)
        return box

    # --- plans --------------------------------------------------------------------------------

    def want(self, key: str, offset: Sequence[int], target: torch.Tensor) -> Want[torch.Tensor]:
        """The box at `offset` of the size of `target`, which it is to fill."""
        extent, shape = self.extents[key], tuple(target.shape)
        sides = zip(offset, shape, extent.spec.shape, strict=True)
        assert all(0 <= o <= o + n <= f for o, n, f in sides), (key, offset, shape, extent)
        return Want(extent, tuple(offset), shape, target.detach())

    def plan(self, wants: Sequence[Want[Any]], read_bytes: int | None = None) -> list[Read[Any]]:
        """How to read some boxes (see `ranges`); `read_bytes` at once, or READ_BYTES."""
        gap_bytes = LOCAL_GAP_BYTES if self.is_local else REMOTE_GAP_BYTES
        return plan_reads(wants, read_bytes or READ_BYTES, gap_bytes)

    def fetch(self, read: Read[torch.Tensor], scratch: torch.Tensor | None = None) -> None:
        """Carry out a planned read: what it is for is filled.

        scratch: uint8 memory that may be used, as long as the read."""
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

    # --- bytes --------------------------------------------------------------------------------

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Fill memory with what stands from byte `begin` on."""
        if self._path is None:
            memory[:] = store.read_range(self.url, begin, begin + len(memory), self._version)
            return
        # Opened for each read: a step may have more files than a process may have open. Without
        # O_NONBLOCK a pipe in the place of a file would be waited for.
        with store.operation("read", self.url):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                self._check_stamp(os.fstat(descriptor))
                while memory:
                    count = os.preadv(descriptor, [memory], begin)
                    if not count:
                        raise ArtifactError(f"{self.url}: ends at byte {begin}; it is truncated")
                    memory, begin = memory[count:], begin + count
            finally:
                os.close(descriptor)

    def digest(self) -> str:
        """Of all its bytes, which are read."""
        running = hasher()
        for block in self._blocks():
            running.update(block)
        return str(running.hexdigest())

    def _blocks(self) -> Iterator[bytes | memoryview]:
        if not self.is_local:
            whole = ahead.ByteRange(self.url, 0, self.size_bytes, self._version)
            yield from ahead.read_ahead(ahead.blocks([whole]))
            return
        memory = memoryview(bytearray(min(READ_BYTES, self.size_bytes)))
        for begin in range(0, self.size_bytes, READ_BYTES):
            block = memory[: min(READ_BYTES, self.size_bytes - begin)]
            self.read_into(begin, block)
            yield block

    def check_unchanged(self) -> None:
        """Raise ArtifactError when a local file was written to or replaced since it was opened; of
        a remote one every read sees to that."""
        if self._path is not None:
            self._check_stamp(self._path.stat() if self._path.exists() else None)

    def _check_stamp(self, found: os.stat_result | None) -> None:
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise ArtifactError(f"{self.url}: not a file")
        if found is None or _stamp_of(found) != self._stamp:
            raise ArtifactError(f"{self.url}: changed while it was being read")

    def close(self) -> None:
        """Nothing is held between reads."""

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _stamp_of(found: os.stat_result) -> tuple[int, int, int]:
    """What changes when the contents do, and not when another link to them is made."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def box_of(memory: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The box of a tensor that begins at `offset` and has `shape`: the same memory."""
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        memory = memory.narrow(dim, begin, length)
    return memory


def _target(part: Part[torch.Tensor]) -> torch.Tensor:
    return box_of(part.want.target, part.local, part.shape)


def values_in(data: torch.Tensor, read: Read[Any], part: Part[Any]) -> torch.Tensor:
    """The elements of a part in the bytes that were read, without a copy where that can be."""
    flat = data[part.begin - read.begin : part.end - read.begin]
    if flat.data_ptr() % part.itemsize or flat.storage_offset() % part.itemsize:
        flat = flat.clone()
    values = flat.view(DTYPES[part.want.extent.spec.dtype])
    return values.as_strided(part.shape, part.strides, values.storage_offset())


def _memory_of(part: Part[torch.Tensor]) -> memoryview | None:
    """The memory that a part is to fill, where the bytes of the file can be read straight into
    it."""
    target = _target(part)
    is_same = target.dtype == DTYPES[part.want.extent.spec.dtype] and target.device.type == "cpu"
    if not (is_same and part.is_one_run and target.is_contiguous()):
        return None
    return memoryview(target.reshape(-1).view(torch.uint8).numpy().data)
