"""Writer and reader of Megatron's token files, PREFIX.bin and PREFIX.idx; `layout` has the format.

The writer appends documents as they come, the reader maps the pair into memory. Knows nothing of
text or tokenizers."""

from __future__ import annotations

import itertools
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainyard.artifacts import store
from trainyard.corpus.layout import (
    CODES,
    MAX_SEQUENCE_LENGTH,
    ByteSink,
    Index,
    Tokens,
    check_bin_size,
    optimal_dtype,
    parse_index,
    verify_index,
    write_array,
    write_header,
    write_offsets,
)
from trainyard.errors import DataError

__all__ = ["IndexedDataset", "IndexedWriter", "map_file", "optimal_dtype", "read_index"]

BUFFER_BYTES = 1 << 20


class IndexedWriter:
    """Appends documents to a .bin as they come and writes the .idx at the end.

    Beyond a small buffer it holds 4 bytes a sequence and 8 bytes a document."""

    def __init__(self, bin_file: ByteSink, dtype: npt.DTypeLike, multimodal: bool = False) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"tokens of type {self.dtype} have no code in the .idx format")
        self._bin = bin_file
        self._pending = bytearray()
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._modes = array("b") if multimodal else None

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """Documents added so far, empty ones included."""
        return len(self._bounds) - 1

    def add_document(
        self, sequences: Iterable[Sequence[int] | Tokens], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document; with no sequences at all it is still a document."""
        before = len(self._lengths)
        for sequence in sequences:
            tokens = self._as_tokens(sequence)
            self._pending += tokens.tobytes()
            self._lengths.append(len(tokens))
        self._add_modes(modes, len(self._lengths) - before)
        self._bounds.append(len(self._lengths))
        if len(self._pending) >= BUFFER_BYTES:
            self._flush()

    def write_index(self, idx_file: ByteSink) -> None:
        """Finish: the rest of the .bin, then the whole .idx."""
        self._flush()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        write_header(idx_file, self.dtype, len(lengths), len(self._bounds))
        write_array(idx_file, lengths, "<i4")
        write_offsets(idx_file, lengths, self.dtype.itemsize)
        write_array(idx_file, np.frombuffer(self._bounds, dtype=np.int64), "<i8")
        if self._modes is not None:
            idx_file.write(self._modes.tobytes())

    def _add_modes(self, modes: Sequence[int] | None, num_sequences: int) -> None:
        if modes is not None and (self._modes is None or len(modes) != num_sequences):
            raise DataError(
                f"{len(modes)} modes for {num_sequences} sequences: a multimodal file has one each"
            )
        if self._modes is not None:
            self._modes.extend([0] * num_sequences if modes is None else modes)

    def _as_tokens(self, sequence: Sequence[int] | Tokens) -> Tokens:
        tokens = np.asarray(sequence)
        if len(tokens) > MAX_SEQUENCE_LENGTH:
            raise DataError(
                f"a sequence of {len(tokens)} tokens: the format ends at {MAX_SEQUENCE_LENGTH}"
            )
        if tokens.dtype == self.dtype:
            return tokens
        _check_range(tokens, self.dtype)
        return tokens.astype(self.dtype)

    def _flush(self) -> None:
        if self._pending:
            self._bin.write(bytes(self._pending))
            self._pending.clear()


def _check_range(tokens: Tokens, dtype: np.dtype[Any]) -> None:
    if not len(tokens) or dtype.kind == "f":
        return
    limits = np.iinfo(dtype)
    for bad in (tokens.min(), tokens.max()):
        if not limits.min <= bad <= limits.max:
            raise DataError(f"token {bad} does not fit {dtype}, the type that these files store")


def map_file(path: Path, dtype: npt.DTypeLike = np.uint8) -> Tokens:
    """A local file as a read-only array backed by the page cache."""
    if path.stat().st_size == 0:  # mmap refuses an empty file
        return np.empty(0, dtype)
    return np.asarray(
        np.memmap(path, dtype=dtype, mode="r")
    )  # as a plain array: slicing costs a third


def read_index(prefix_url: str, cache: Path) -> Index:
    """The index of a pair, every entry of it checked, and the size of the .bin; a remote .idx is
    copied to `cache`."""
    index = parse_index(map_file(store.fetch(prefix_url + ".idx", cache)), prefix_url + ".idx")
    verify_index(index, prefix_url + ".idx")
    check_bin_size(index, store.info(prefix_url + ".bin").size_bytes, prefix_url)
    return index


class IndexedDataset:
    """Random access to the sequences of PREFIX.bin and PREFIX.idx.

    A local pair is mapped where it lies. One of a remote store is copied first, to the folder
    `cache` (and used again if it is there already), else to a temporary folder that goes with the
    object. Pickles as its prefix, so that handing one to a worker process costs nothing."""

    def __init__(self, prefix_url: str, cache: Path | None = None) -> None:
        self.prefix = prefix_url
        self._cache = cache
        if cache is None and not store.is_local(prefix_url):
            self._temporary = tempfile.TemporaryDirectory(prefix="trainyard-tokens-")
            cache = Path(self._temporary.name)
        self.index = read_index(prefix_url, cache or Path())
        self._tokens = map_file(store.fetch(prefix_url + ".bin", cache or Path()), self.index.dtype)

    def __reduce__(self) -> tuple[Callable[..., IndexedDataset], tuple[str, Path | None]]:
        return IndexedDataset, (self.prefix, self._cache)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.index.sequence_lengths)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token."""
        return self.index.dtype

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """(S,) tokens of each sequence."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """(D,) sequence index at each document bound: document d is sequences [d] up to [d + 1]."""
        return self.index.document_indices

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.index.document_indices) - 1

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Tokens:
        """`length` tokens (default: all) of sequence `i` from `offset` on: a view, no copy."""
        if not 0 <= i < len(self.index.sequence_lengths):
            raise IndexError(f"sequence {i} of {self.prefix}: there are {len(self)}")
        available = int(self.index.sequence_lengths[i])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(f"tokens {offset} to {stop} of sequence {i}, which has {available}")
        start = int(self.index.sequence_offsets[i]) // self.index.dtype.itemsize
        return self._tokens[start + offset : start + stop]

    def documents(self) -> Iterator[list[Tokens]]:
        """Every document as its sequences, in order."""
        for first, last in itertools.pairwise(self.document_indices.tolist()):
            yield [self.get(i) for i in range(first, last)]
