"""Reads tensors of torch's distributed checkpoint, box by box, from the `.distcp` files.

Each piece is an archive of `torch.save` in a range of its file. `torch_save.zip` finds its records,
`torch_save.pickles` reads its small pickle (many in one process), and values are read directly from
the file. torch.load is not used."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from trainyard.artifacts.urls import join
from trainyard.conversion.ranged_file import RangedFile
from trainyard.conversion.torch_dist.index import Shape, StoredPiece, StoredTensor
from trainyard.conversion.torch_save.file import TORCH_DTYPES
from trainyard.conversion.torch_save.pickles import SIZES, TensorRef, unpickle_all
from trainyard.conversion.torch_save.zip import (
    LOCAL_HEADER,
    Archive,
    RecordCheck,
    Span,
    read_archive,
)
from trainyard.errors import ArtifactError

MAX_OPEN = 8
"""Most open files; a large run may have written two for each rank."""

MAX_PICKLE_BYTES = 2**20
"""Largest pickle of a piece, which is one tensor and takes a few hundred bytes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a piece's values in its file."""

    storage: Span
    ref: TensorRef


class StoredTensors:
    """Tensors of one folder, by their keys; close it after use.

    Raises ArtifactError, before reading any tensor, if the files contradict the index."""

    def __init__(self, url: str, tensors: Mapping[str, StoredTensor]) -> None:
        self._url, self._tensors = url, tensors
        self._files: OrderedDict[str, RangedFile] = OrderedDict()
        self._check = RecordCheck()
        try:
            self._places = self._locate()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A copy of a box of a tensor."""
        tensor = self._tensors[name]
        if tensor.unflattened is None and 0 not in shape:
            rows = self._rows_without_copy(name, tensor, offset, shape)
            if rows is not None:
                return rows
        out = torch.empty(shape, dtype=TORCH_DTYPES[tensor.dtype])
        if 0 in shape:
            return out
        if tensor.unflattened is None:
            self._copy(name, tensor, out, offset)
            return out
        grid = tensor.shape[:-1]
        cell = tuple(n // parts for n, parts in zip(tensor.unflattened, grid, strict=True))
        for at in _cells(offset, shape, cell):
            flat = torch.empty((*(1 for _ in at), math.prod(cell)), dtype=out.dtype)
            self._copy(name, tensor, flat, (*at, 0))
            begin = tuple(i * n for i, n in zip(at, cell, strict=True))
            _copy_common(out, offset, flat.reshape(cell), begin)
        return out

    def _rows_without_copy(
        self, name: str, tensor: StoredTensor, offset: Shape, shape: Shape
    ) -> Tensor | None:
        """A box that is whole rows of one piece; None for any other box."""
        for piece in tensor.pieces:
            rows = _rows_of(piece, offset, shape)
            if len(rows) == (shape[0] if shape else 1) and (
                (piece.offset[1:], piece.shape[1:]) == (offset[1:], shape[1:])
            ):
                found = self._view(piece.file, self._places[name][piece], rows)
                return found.contiguous()
        return None

    def _copy(self, name: str, tensor: StoredTensor, out: Tensor, offset: Shape) -> None:
        """Fill a box from the stored pieces."""
        wanted = [p for p in tensor.pieces if _meet(p.offset, p.shape, offset, tuple(out.shape))]
        for piece in wanted:
            rows = _rows_of(piece, offset, tuple(out.shape))
            view = self._view(piece.file, self._places[name][piece], rows)
            begin = (piece.offset[0] + rows.start, *piece.offset[1:]) if piece.shape else ()
            _copy_common(out, offset, view, begin)

    def _view(self, file: str, place: _Place, rows: range) -> Tensor:
        """Rows of a piece; the whole piece if it has no dims."""
        ref = place.ref
        if ref.shape:
            shape = (len(rows), *ref.shape[1:])
            ref = replace(ref, offset=ref.offset + rows.start * ref.stride[0], shape=shape)
        item = SIZES[ref.dtype]
        span = 1 + sum((n - 1) * step for n, step in zip(ref.shape, ref.stride, strict=True))
        begin = place.storage.begin + ref.offset * item
        data = self._check.read(self._open(file), place.storage, begin, span * item)
        return torch.frombuffer(data, dtype=TORCH_DTYPES[ref.dtype]).as_strided(
            ref.shape, ref.stride
        )

    # --- archives -------------------------------------------------------------------------

    def _locate(self) -> dict[str, dict[StoredPiece, _Place]]:
        """The positions of the values of every piece of every tensor."""
        keys, pieces = [], []
        for name, tensor in self._tensors.items():
            filled = [piece for piece in tensor.pieces if 0 not in piece.shape]
            keys += [name] * len(filled)
            pieces += filled
        archives = [self._archive(piece) for piece in pieces]
        data = [self._record(p, archive) for p, archive in zip(pieces, archives, strict=True)]
        trees = unpickle_all([(a.url, d) for a, d in zip(archives, data, strict=True)])
        found: dict[str, dict[StoredPiece, _Place]] = {name: {} for name in self._tensors}
        for name, piece, archive, tree in zip(keys, pieces, archives, trees, strict=True):
            found[name][piece] = self._place(piece, archive, tree, self._tensors[name].dtype)
        return found

    def _archive(self, piece: StoredPiece) -> Archive:
        file = self._open(piece.file)
        where = f"{file.url} at byte {piece.begin}"
        if piece.begin + piece.length > file.size_bytes:
            raise ArtifactError(
                f"{file.url}: has {file.size_bytes} bytes, but a piece ends at "
                f"{piece.begin + piece.length}; it is truncated"
            )
        return read_archive(file.window(piece.begin, piece.length), piece.length, where)

    def _record(self, piece: StoredPiece, archive: Archive) -> bytes:
        record = archive.records["data.pkl"]
        if record.size_bytes > MAX_PICKLE_BYTES:
            raise ArtifactError(
                f"{archive.url}: its pickle has {record.size_bytes} bytes; the limit is "
                f"{MAX_PICKLE_BYTES}"
            )
        return self._whole(piece, archive, "data.pkl")

    def _whole(self, piece: StoredPiece, archive: Archive, name: str) -> bytes:
        """The bytes of a small record."""
        span = self._span_of(piece, archive, name)
        return bytes(self._check.read(self._open(piece.file), span, span.begin, span.size_bytes))

    def _span_of(self, piece: StoredPiece, archive: Archive, name: str) -> Span:
        """The position of a record in the file."""
        record = archive.records[name]
        header = self._open(piece.file).range(piece.begin + record.header, LOCAL_HEADER.size)
        begin = piece.begin + archive.begin_of(name, bytes(header))
        return Span(begin, record.size_bytes, record.crc)

    def _place(self, piece: StoredPiece, archive: Archive, tree: object, dtype: str) -> _Place:
        if not isinstance(tree, TensorRef) or (tree.shape, tree.dtype) != (piece.shape, dtype):
            found = f"{tree.dtype} {list(tree.shape)}" if isinstance(tree, TensorRef) else "none"
            raise ArtifactError(
                f"{archive.url}: wanted a tensor {dtype} {list(piece.shape)} by the index, found "
                f"{found}; the file is damaged"
            )
        order = archive.records.get("byteorder")
        if order is not None and (
            order.size_bytes != 6 or self._whole(piece, archive, "byteorder") != b"little"
        ):
            raise ArtifactError(f"{archive.url}: was written on a big-endian machine")
        record = archive.records.get(f"data/{tree.key}")
        if record is None or record.size_bytes != tree.storage_bytes or tree.repeats:
            found = "no bytes" if record is None else f"{record.size_bytes} bytes"
            raise ArtifactError(
                f"{archive.url}: a tensor of {tree.storage_bytes} bytes has {found}; the file is "
                "damaged"
            )
        return _Place(self._span_of(piece, archive, f"data/{tree.key}"), tree)

    # --- files ----------------------------------------------------------------------------

    def _open(self, name: str) -> RangedFile:
        file = self._files.pop(name, None) or RangedFile(join(self._url, name))
        self._files[name] = file
        if len(self._files) > MAX_OPEN:
            self._files.popitem(last=False)[1].close()
        return file

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()


# --- boxes ------------------------------------------------------------------------------------


def _meet(offset: Shape, shape: Shape, other_offset: Shape, other_shape: Shape) -> bool:
    """Whether two boxes have an element in common."""
    both = zip(offset, shape, other_offset, other_shape, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in both)


def _rows_of(piece: StoredPiece, offset: Shape, shape: Shape) -> range:
    """The rows of a piece that a box covers, numbered in the piece."""
    if not piece.shape:
        return range(1)
    begin = max(piece.offset[0], offset[0])
    end = min(piece.offset[0] + piece.shape[0], offset[0] + shape[0])
    return range(begin - piece.offset[0], end - piece.offset[0])


def _copy_common(out: Tensor, offset: Shape, part: Tensor, begin: Shape) -> None:
    """Copy the intersection of `part`, at `begin`, and `out`, a box at `offset`, into `out`."""
    for dim, (a, b) in enumerate(zip(offset, begin, strict=True)):
        first, last = max(a, b), min(a + out.shape[dim], b + part.shape[dim])
        out, part = (
            out.narrow(dim, first - a, last - first),
            part.narrow(dim, first - b, last - first),
        )
    out.copy_(part)


def _cells(offset: Shape, shape: Shape, cell: Shape) -> Iterator[Shape]:
    """The cells of a grid that a box touches. cell: the shape of each."""
    spans = zip(offset, shape, cell, strict=True)
    return product(*(range(a // n, (a + size - 1) // n + 1) for a, size, n in spans))
