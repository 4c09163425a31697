"""Opens a file of `torch.save`: its tree, and its tensors, which are read from the file on request.

There are two layouts. Since torch 1.6 it is a zip archive (zip.py). Before, as in NVIDIA's
GPT-345M, it is a sequence: five pickles (magic number, protocol, system, the object, list of
storages), then for each storage its number of elements (8 bytes, little-endian) and its bytes.

`pickles` reads the pickles."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.file import DTYPE_NAMES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.ranged_file import RangedFile
from trainyard.conversion.torch_save.pickles import (
    LIMITS,
    SIZES,
    Recorded,
    TensorRef,
    Unpickled,
    unpickle,
)
from trainyard.conversion.torch_save.zip import (
    LOCAL_HEADER,
    Archive,
    RecordCheck,
    Span,
    read_archive,
)
from trainyard.errors import ArtifactError

LEGACY_BEGIN = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The magic number of torch before 1.6, pickled."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "double": torch.float64,
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "long": torch.int64,
    "int32": torch.int32,
    "int": torch.int32,
    "int16": torch.int16,
    "short": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class TorchFile(Closing):
    """A file that is open for reading; use it as a context manager. Raises ArtifactError for a file
    that is truncated, hostile, or not of torch.save.

    allow: classes that may occur besides those of tensors and containers (`pickles.unpickle`).
    part: first byte and length of the range to read as the file; None: the whole file."""

    def __init__(
        self, url: str, allow: Collection[str] = (), part: tuple[int, int] | None = None
    ) -> None:
        self.url = url
        self._file = RangedFile(url, part)
        self._archive: Archive | None = None
        self._spans: dict[str, Span] = {}
        """Of the storages that were looked up so far."""
        self._check = RecordCheck()
        try:
            self.size_bytes = self._file.size_bytes
            found = self._open(allow)
        except BaseException:
            self.close()
            raise
        self.tree: Any = found.tree
        self.network = found.network

    def _open(self, allow: Collection[str]) -> Unpickled:
        head = bytes(self._file.range(0, min(len(LEGACY_BEGIN), self.size_bytes)))
        if head[:4] == b"PK\3\4":
            return self._open_archive(allow)
        if head == LEGACY_BEGIN:
            return self._open_legacy(allow)
        raise ArtifactError(
            f"{self.url}: begins with {head[:8]!r}, so it is not a file of torch.save (or one of "
            "torch before 0.4, which trainyard cannot read)"
        )

    # --- since torch 1.6 ------------------------------------------------------------------

    def _open_archive(self, allow: Collection[str]) -> Unpickled:
        self._archive = archive = read_archive(
            self._file.window(0, self.size_bytes), self.size_bytes, self.url
        )
        if "byteorder" in archive.records and bytes(self._record("byteorder", 16)) != b"little":
            raise ArtifactError(f"{self.url}: was written on a big-endian machine")
        data = self._record("data.pkl", LIMITS["input_bytes"])
        return unpickle(data, self.url, allow=allow)

    def _record(self, name: str, limit: int) -> bytearray:
        assert self._archive is not None
        record = self._archive.records[name]
        if record.size_bytes > limit:
            raise ArtifactError(
                f"{self.url}: record {name!r} has {record.size_bytes} bytes; the limit is {limit}"
            )
        span = self._span_of_record(name)
        return self._check.read(self._file, span, span.begin, span.size_bytes)

    def _span_of_record(self, name: str) -> Span:
        assert self._archive is not None
        record = self._archive.records[name]
        header = self._file.range(record.header, LOCAL_HEADER.size)
        begin = self._archive.begin_of(name, bytes(header))
        return Span(begin, record.size_bytes, record.crc)

    # --- before ---------------------------------------------------------------------------

    def _open_legacy(self, allow: Collection[str]) -> Unpickled:
        head = self._file.range(0, min(self.size_bytes, LIMITS["input_bytes"]))
        found = unpickle(head, self.url, allow=allow, layout="legacy")
        place = found.end
        for storage in found.storages:
            (numel,) = struct.unpack("<q", self._file.range(place, 8))
            if numel != storage.numel:
                raise ArtifactError(
                    f"{self.url}: storage {storage.key!r} has {numel} elements at byte {place}, "
                    f"but the pickle says {storage.numel}; the file is damaged"
                )
            size = storage.numel * storage.item_bytes
            self._spans[storage.key] = Span(place + 8, size, 0)  # no checksum in these files
            place += 8 + size
        if place > self.size_bytes:
            raise ArtifactError(
                f"{self.url}: its storages end at byte {place}, but the file at "
                f"{self.size_bytes}; it is truncated"
            )
        return found

    # --- tensors --------------------------------------------------------------------------

    def read(self, ref: TensorRef) -> Tensor:
        """A contiguous copy of the values of a tensor."""
        return self.view(ref).contiguous()

    def view(self, ref: TensorRef) -> Tensor:
        """The values of a tensor, a copy with the strides that it has in the file."""
        if ref.dtype not in TORCH_DTYPES:
            raise ArtifactError(
                f"{self.url}: has a tensor of {ref.dtype}, which trainyard cannot read"
            )
        dtype, item = TORCH_DTYPES[ref.dtype], SIZES[ref.dtype]
        span = self._span_of_storage(ref)
        if ref.numel == 0:
            return torch.empty(ref.shape, dtype=dtype)
        length = 1 + sum((n - 1) * step for n, step in zip(ref.shape, ref.stride, strict=True))
        begin = span.begin + ref.offset * item
        data = self._check.read(self._file, span, begin, length * item)
        return torch.frombuffer(data, dtype=dtype).as_strided(ref.shape, ref.stride)

    def check(self, ref: TensorRef) -> None:
        """Raise ArtifactError if the storage of a tensor is not in the file. Reads no values."""
        self._span_of_storage(ref)

    def _span_of_storage(self, ref: TensorRef) -> Span:
        name = f"data/{ref.key}"
        if ref.repeats:
            raise ArtifactError(
                f"{self.url}: a tensor of shape {list(ref.shape)[:8]} in {ref.storage_bytes} bytes "
                f"of {name!r:.60} repeats values, which no weight does; save it contiguous"
            )
        if self._archive is not None:
            record = self._archive.records.get(name)
            if record is None or record.size_bytes != ref.storage_bytes:
                found = "no record" if record is None else f"{record.size_bytes} bytes"
                raise ArtifactError(
                    f"{self.url}: a tensor needs {ref.storage_bytes} bytes of {name!r}, which has "
                    f"{found}; the file is damaged"
                )
            if ref.key not in self._spans:
                self._spans[ref.key] = self._span_of_record(name)
        elif ref.key not in self._spans:
            raise ArtifactError(f"{self.url}: its list of storages lacks {ref.key!r}")
        return self._spans[ref.key]

    def close(self) -> None:
        """Close the file; tensors that were read stay valid."""
        self._file.close()


def tensor_refs(tree: Any) -> list[TensorRef]:
    """Every tensor below a node of a tree."""
    if isinstance(tree, TensorRef):
        return [tree]
    if isinstance(tree, dict):
        return [ref for value in tree.values() for ref in tensor_refs(value)]
    if isinstance(tree, list | tuple):
        return [ref for value in tree for ref in tensor_refs(value)]
    return tensor_refs((tree.args, tree.state)) if isinstance(tree, Recorded) else []


# --- files of weights -------------------------------------------------------------------------


class TorchWeights:
    """The tensors of a file that contains a dict; its other values are ignored.

    Raises ArtifactError for a file that is truncated, hostile, or of another kind."""

    def __init__(self, url: str) -> None:
        self._file = TorchFile(url)
        try:
            self._refs = _weights(self._file.tree, url)
            for ref in self._refs.values():
                self._file.check(ref)
        except BaseException:
            self.close()
            raise
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(DTYPE_NAMES[TORCH_DTYPES[ref.dtype]], ref.shape)
            for name, ref in self._refs.items()
        }

    def are_one(self, name: str, other: str) -> bool:
        """Whether both names exist and refer to the same values in the file."""
        return name in self._refs and self._refs[name] == self._refs.get(other)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._file.read(self._refs[name])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _weights(tree: object, url: str) -> dict[str, TensorRef]:
    found = tree if isinstance(tree, dict) else {}
    refs = {str(name): ref for name, ref in found.items() if isinstance(ref, TensorRef)}
    if not refs:
        raise ArtifactError(f"{url}: contains no dict of tensors by name")
    for name, ref in refs.items():
        if ref.dtype not in TORCH_DTYPES:
            raise ArtifactError(
                f"{url}: {name} is of type {ref.dtype}, which trainyard cannot read"
            )
    return refs
