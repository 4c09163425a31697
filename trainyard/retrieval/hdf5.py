"""The HDF5 files of a chunk database, under the names and types of Megatron-LM's Retro.

individual/NAME/START-END.hdf5, for every block of documents of a dataset:

    chunks_valid     u32 [n, 4]   document, start, end, BERT tokens
    chunks_invalid   u32 [m, 4]   the same for chunks without BERT tokens
    doc_offsets      u64 [d, 2]   document, number of valid chunks up to its end, within the block

merged/sampled.hdf5, merged/train.hdf5, merged/valid.hdf5, over all datasets:

    chunks           u32 [n, 5]   dataset, document, start, end, BERT tokens
    doc_offsets      u64 [d, 3]   train only: dataset, document, number of chunks up to its end
    n_written        u64 [1]      n

Arrays are contiguous and carry no times, so equal contents are equal bytes."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ArtifactError
from trainyard.retrieval.chunks import Block, Rows
from trainyard.retrieval.hdf5_arrays import find_array

MERGED = ("sampled", "train", "valid")

ENDING = ".hdf5"


def merged_name(kind: str) -> str:
    """Name of a merged database: one of `MERGED`."""
    return f"merged/{kind}{ENDING}"


def block_name(dataset: str, first: int, last: int, num_documents: int) -> str:
    """Name of the block of the documents from `first` up to `last`."""
    return f"individual/{dataset}/{range_name(first, last, num_documents)}"


def range_name(first: int, last: int, total: int) -> str:
    """Name of a file about the numbers from `first` up to `last`, of `total` numbers."""
    digits = math.ceil(math.log(total) / math.log(10)) + 1
    return f"{first:0{digits}d}-{last:0{digits}d}{ENDING}"


def write_block(path: Path, block: Block) -> None:
    """Write the file of a block."""
    with _create(path) as file:
        for name, values in block._asdict().items():
            file.create_dataset(name, data=values)


def read_block(path: Path, name: str) -> Block:
    """The contents of a block. name: for messages."""
    content = path.read_bytes()
    file = io.BytesIO(content)
    found = (find_array(file, len(content), key, name).within(content) for key in Block._fields)
    block = Block(*found)
    for key, values in block._asdict().items():
        dtype, columns = ("uint64", 2) if key == "doc_offsets" else ("uint32", 4)
        if values.shape == (0,):  # what Megatron-LM writes if there are none
            block = block._replace(**{key: np.empty((0, columns), dtype)})
            continue
        if values.dtype != dtype or values.ndim != 2 or values.shape[1] != columns:
            raise ArtifactError(
                f"{name}: {key} holds {values.dtype} of shape {values.shape}, not {dtype} of shape "
                f"(n, {columns})"
            )
    return block


class MergedWriter:
    """Writes a merged database piece by piece; all sizes are known at the start."""

    def __init__(self, path: Path, num_chunks: int, num_documents: int | None) -> None:
        self._file = _create(path)
        self._chunks = self._file.create_dataset("chunks", (num_chunks, 5), np.uint32)
        self._offsets = None
        if num_documents is not None:
            self._offsets = self._file.create_dataset("doc_offsets", (num_documents, 3), np.uint64)
        self._written = self._documents = 0

    def append(
        self, dataset: int, rows: Rows, doc_offsets: NDArray[np.uint64] | None = None
    ) -> None:
        """Append chunks of a block, and the offsets of its documents, which count from these."""
        chunks = np.insert(rows, 0, dataset, axis=1)
        if doc_offsets is not None and self._offsets is not None:
            offsets = np.insert(doc_offsets, 0, dataset, axis=1)
            offsets[:, 2] += np.uint64(self._written)
            self._offsets[self._documents : self._documents + len(offsets)] = offsets
            self._documents += len(offsets)
        self._chunks[self._written : self._written + len(chunks)] = chunks
        self._written += len(chunks)

    def __enter__(self) -> MergedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                assert self._written == len(self._chunks)
                assert self._offsets is None or self._documents == len(self._offsets)
                self._file.create_dataset("n_written", data=np.array([self._written], np.uint64))


def _create(path: Path) -> h5py.File:
    # The oldest layout, which every HDF5 library reads.
    return h5py.File(path, "w", libver="earliest")
