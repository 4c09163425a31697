"""Writer and reader of Megatron's token files, PREFIX.bin and PREFIX.idx; `layout` has the format.

The writer appends documents as they come, the reader maps the pair into memory. Knows nothing of
text or tokenizers."""

from __future__ import annotations

import itertools
import tempfile
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
from trainyard.corpus.spill import Spill
from trainyard.errors import DataError

__all__ = ["IndexedDataset", "IndexedWriter", "map_file", "optimal_dtype", "read_index"]

BUFFER_BYTES = 1 << 20


class IndexedWriter:
    """Appends documents to a .bin as they come and writes the .idx at the end.

    Memory does not grow with what is written: lengths and bounds go to a temporary file."""

    def __init__(self, bin_file: ByteSink, dtype: npt.DTypeLike, multimodal: bool = False) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"tokens of type {self.dtype} have no code in the .idx format")
        self._bin = bin_file
        self._pending = bytearray()
        self._lengths = Spill(np.int32)
        self._bounds = Spill(np.int64)
        self._modes = Spill(np.int8) if multimodal else None
        self._num_tokens = 0

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """Documents added so far, empty ones included."""
        return len(self._bounds)

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return self._num_tokens

    def add_document(
        self, sequences: Iterable[Sequence[int] | Tokens], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document; with no sequences at all it is still a document."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        converted = [_convert(array, self.dtype) for array in arrays]
        tokens = np.concatenate(converted) if converted else np.empty(0, self.dtype)
        self.add_flat(tokens, [len(array) for array in arrays], [len(arrays)], modes)

    def add_flat(
        self,
        ids: Tokens,
        sequence_lengths: npt.ArrayLike,
        sequences_per_document: npt.ArrayLike | None = None,
        modes: npt.ArrayLike | None = None,
    ) -> None:
        """Append many documents at once, without a loop over them.

        ids: (n,) whole numbers, the tokens of all sequences end to end. sequence_lengths: tokens of
        each sequence, n in all. sequences_per_document: how many sequences each document has, 0 for
        an empty one; None makes every sequence a document. modes: as in `add_document`."""
        lengths = np.atleast_1d(np.asarray(sequence_lengths, np.int64))
        counts = np.ones(len(lengths), np.int64)
        if sequences_per_document is not None:
            counts = np.atleast_1d(np.asarray(sequences_per_document, np.int64))
        _check_flat(ids, lengths, counts)
        kinds = self._check_modes(modes, len(lengths))
        tokens = _convert(ids, self.dtype)
        self._bounds.extend(np.cumsum(counts) + len(self._lengths))
        self._lengths.extend(lengths)
        if self._modes is not None:
            self._modes.extend(kinds)
        self._num_tokens += len(tokens)
        self._write(tokens)

    def write_index(self, idx_file: ByteSink) -> None:
        """Finish: the rest of the .bin, then the whole .idx."""
        self._flush()
        write_header(idx_file, self.dtype, self.num_sequences, self.num_documents + 1)
        for lengths in self._lengths.chunks():
            write_array(idx_file, lengths, "<i4")
        end = 0
        for lengths in self._lengths.chunks():
            end = write_offsets(idx_file, lengths, self.dtype.itemsize, end)
        write_array(idx_file, np.zeros(1), "<i8")
        for bounds in self._bounds.chunks():
            write_array(idx_file, bounds, "<i8")
        for modes in self._modes.chunks() if self._modes is not None else ():
            write_array(idx_file, modes, "i1")

    def _check_modes(self, modes: npt.ArrayLike | None, num_sequences: int) -> Tokens:
        kinds = np.zeros(num_sequences, np.int8) if modes is None else np.asarray(modes, np.int8)
        if modes is not None and (self._modes is None or len(kinds) != num_sequences):
            raise DataError(
                f"{len(kinds)} modes for {num_sequences} sequences: a multimodal file has one each"
            )
        return kinds

    def _write(self, tokens: Tokens) -> None:
        if tokens.nbytes >= BUFFER_BYTES:
            self._flush()
            self._bin.write(np.ascontiguousarray(tokens).view(np.uint8).data)
            return
        self._pending += tokens.tobytes()
        if len(self._pending) >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._bin.write(bytes(self._pending))
            self._pending.clear()


def _check_flat(ids: Tokens, lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
    longest = int(lengths.max(initial=0))
    if longest > MAX_SEQUENCE_LENGTH:
        raise DataError(f"a sequence of {longest} tokens: the format ends at {MAX_SEQUENCE_LENGTH}")
    if min(lengths.min(initial=0), counts.min(initial=0)) < 0 or lengths.sum() != len(ids):
        raise DataError(f"the lengths of the sequences add up to {lengths.sum()}, not {len(ids)}")
    if counts.sum() != len(lengths):
        raise DataError(
            f"the documents have {counts.sum()} sequences in all, but {len(lengths)} were given"
        )


def _convert(tokens: Tokens, dtype: np.dtype[Any]) -> Tokens:
    """As the type that is stored; a token that does not fit it is a DataError."""
    if tokens.dtype == dtype:
        return tokens
    if len(tokens) and dtype.kind != "f":
        limits = np.iinfo(dtype)
        for bad in (tokens.min(), tokens.max()):
            if not limits.min <= bad <= limits.max:
                raise DataError(
                    f"token {bad} does not fit {dtype}, the type that these files store"
                )
    return tokens.astype(dtype)


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

    @property
    def tokens(self) -> Tokens | None:
        """All tokens of the .bin end to end, where it is mapped; for those who read many places."""
        return self._tokens

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
