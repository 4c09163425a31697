"""Writes a file for `torch.load`, with one tensor at a time in memory.

It may contain plain containers, numbers, strings, `argparse.Namespace`, dtypes and tensors.
`torch.save` needs all tensors of a file at once; here a LazyTensor has the type and shape, and
makes the values when they are written. Equal contents give equal bytes.

    NAME/data.pkl  NAME/byteorder  NAME/data/0  NAME/data/1  ...  NAME/version"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, cast

import torch
from torch import Tensor

from trainyard.checkpoint.safetensors.file import DTYPES, Sink, spec_of, tensor_bytes
from trainyard.checkpoint.safetensors.header import TensorSpec

ALIGNMENT = 64
"""Storages begin at multiples of this, as torch's do, so that they can be mapped."""

TOGETHER_BYTES = 1 << 20
"""Pieces of less are written together."""

PLAIN = (bool, int, float, str, torch.dtype)

STORAGE_TYPES: dict[str, Any] = {
    "F64": torch.DoubleStorage,
    "F32": torch.FloatStorage,
    "F16": torch.HalfStorage,
    "BF16": torch.BFloat16Storage,
    "I64": torch.LongStorage,
    "I32": torch.IntStorage,
    "I16": torch.ShortStorage,
    "I8": torch.CharStorage,
    "U8": torch.ByteStorage,
    "BOOL": torch.BoolStorage,
}


@dataclass(frozen=True, slots=True)
class _Storage:
    """Stands for a tensor's values in the pickle."""

    key: str
    dtype: str
    numel: int


@dataclass(eq=False)
class LazyTensor:
    """A tensor to write, whose values are made when they are written."""

    spec: TensorSpec
    make: Callable[[], Tensor]
    _key: str = field(default="", init=False)

    @staticmethod
    def of(tensor: Tensor) -> LazyTensor:
        """A LazyTensor of existing values."""
        return LazyTensor(spec_of(tensor), lambda: tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save names this function in every file; its signature is part of the format.
        shape = self.spec.shape
        stride = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
        numel = self.spec.size_bytes // DTYPES[self.spec.dtype].itemsize
        storage = _Storage(self._key, self.spec.dtype, numel)
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (storage, 0, shape, tuple(stride), False, OrderedDict())


class _Stream:
    """The methods that `zipfile` needs of a sink that cannot seek. Small pieces are written
    together: a record has seven, and a file may have a hundred thousand records."""

    def __init__(self, out: Sink) -> None:
        self._out, self._size = out, 0
        self._small = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        if len(data) >= TOGETHER_BYTES:
            self.flush()
            self._out.write(data)
        else:
            self._small += data
            if len(self._small) >= TOGETHER_BYTES:
                self.flush()
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._out.write(bytes(self._small))
        self._small.clear()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", STORAGE_TYPES[obj.dtype], obj.key, "cpu", obj.numel)
        return None


def write_torch_file(out: Sink, tree: Any, folder: str) -> None:
    """Write `tree`, in which tensors are LazyTensors, for `torch.load`. folder: name inside the
    archive."""
    for _ in writing_torch_file(out, tree, folder):
        pass


def writing_torch_file(out: Sink, tree: Any, folder: str) -> Generator[None, None, None]:
    """As `write_torch_file`, a tensor at each step; the caller may write others in between."""
    _refuse_strangers(tree)
    tensors = lazy_tensors(tree)
    for number, tensor in enumerate(tensors):
        tensor._key = str(number)
    body = io.BytesIO()
    _Pickler(body, protocol=2).dump(tree)
    stream = _Stream(out)
    fp = cast(IO[bytes], stream)
    with zipfile.ZipFile(fp, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _add(archive, f"{folder}/data.pkl", body.getvalue())
        _add(archive, f"{folder}/byteorder", b"little")
        for tensor in tensors:
            made = tensor.make()
            assert spec_of(made) == tensor.spec, (spec_of(made), tensor.spec)
            data = tensor_bytes(made) if made.numel() else b""
            _add(archive, f"{folder}/data/{tensor._key}", data)
            del made, data
            yield
        _add(archive, f"{folder}/version", b"3\n")
    stream.flush()


def _refuse_strangers(tree: Any) -> None:
    """Assert that the tree has no class of ours: only trainyard could read such a file."""
    if isinstance(tree, dict):
        for item in (*tree, *tree.values()):
            _refuse_strangers(item)
    elif type(tree) in (list, tuple):
        for item in tree:
            _refuse_strangers(item)
    elif isinstance(tree, Namespace):
        _refuse_strangers(vars(tree))
    else:
        assert tree is None or isinstance(tree, (*PLAIN, LazyTensor)), (
            f"{type(tree)} in a file of torch.save"
        )


def lazy_tensors(tree: Any) -> list[LazyTensor]:
    """The tensors of a tree in its order, each of them once."""
    return list({id(tensor): tensor for tensor in _lazy_tensors(tree)}.values())


def _lazy_tensors(node: Any) -> Iterator[LazyTensor]:
    # Not a recursive closure: its reference cycle would keep tensors alive until collected.
    if isinstance(node, LazyTensor):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _lazy_tensors(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _lazy_tensors(value)


def _add(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    """A stored record whose bytes begin at a multiple of ALIGNMENT."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.file_size = len(data)
    zip64 = len(data) * 1.05 > zipfile.ZIP64_LIMIT  # then zipfile adds 20 bytes to the header
    assert archive.fp is not None
    begin = archive.fp.tell() + 30 + len(name.encode()) + (20 if zip64 else 0) + 4
    padding = -begin % ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding  # torch's own way to align
    with archive.open(info, "w", force_zip64=zip64) as record:
        record.write(data)
