"""Writes and reads Megatron-LM's token files, PREFIX.bin and PREFIX.idx; `layout` has the format.

The writer appends documents as they come, the reader returns any part of any sequence. Knows
nothing of text or tokenizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainyard.artifacts import store
from trainyard.artifacts.by_version import remembered
from trainyard.artifacts.inputs import Manifests
from trainyard.artifacts.store import FileInfo
from trainyard.corpus.disk_array import Spill
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
from trainyard.corpus.readers import (
    CheckedReader,
    Reader,
    TokenReader,
    map_file,
    map_listed,
    open_checked,
)
from trainyard.corpus.remote import CacheOptions
from trainyard.corpus.virtual import find_virtual
from trainyard.corpus.virtual_reader import PartsReader, check_sizes, joined_index
from trainyard.errors import DataError

__all__ = [
    "CacheOptions",
    "IndexedDataset",
    "IndexedWriter",
    "Reader",
    "map_file",
    "optimal_dtype",
    "read_index",
]

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
        """Append one document; without sequences it is an empty document."""
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

        ids: (n,) whole numbers, the concatenated tokens of all sequences. sequence_lengths: tokens
        of each sequence, n in all. sequences_per_document: number of sequences of each document, 0
        for an empty one; None makes every sequence a document. modes: as in `add_document`."""
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
                f"{len(kinds)} modes for {num_sequences} sequences: a multimodal file needs one "
                "for each, another file has none"
            )
        return kinds

    def _write(self, tokens: Tokens) -> None:
        data = np.ascontiguousarray(tokens).view(np.uint8).data
        if len(data) >= BUFFER_BYTES:
            self._flush()
            self._bin.write(data)
            return
        self._pending += data
        if len(self._pending) >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._bin.write(memoryview(self._pending))
            self._pending = bytearray()


def _check_flat(ids: Tokens, lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
    longest = int(lengths.max(initial=0))
    if longest > MAX_SEQUENCE_LENGTH:
        raise DataError(
            f"a sequence has {longest} tokens, but the format allows only {MAX_SEQUENCE_LENGTH}"
        )
    if min(lengths.min(initial=0), counts.min(initial=0)) < 0 or lengths.sum() != len(ids):
        raise DataError(f"the lengths of the sequences add up to {lengths.sum()}, not {len(ids)}")
    if counts.sum() != len(lengths):
        raise DataError(
            f"the documents have {counts.sum()} sequences in all, but {len(lengths)} were given"
        )


def _convert(tokens: Tokens, dtype: np.dtype[Any]) -> Tokens:
    """Tokens in the stored type; DataError for a token that does not fit."""
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


def read_index(
    prefix_url: str, options: CacheOptions | None = None, manifests: Manifests | None = None
) -> Index:
    """The index of a pair or of a virtual dataset, with every entry checked.

    A remote .idx is copied to this node, once."""
    options, manifests = options or CacheOptions(), manifests or Manifests()
    virtual = find_virtual(prefix_url, manifests)
    if virtual is not None:
        return joined_index(virtual, options)
    return _read_pair(prefix_url, options, manifests)[0]


def _read_pair(
    prefix_url: str, options: CacheOptions, manifests: Manifests
) -> tuple[Index, FileInfo]:
    """The index of a pair, and size and version of its .bin."""
    name = prefix_url + ".idx"
    index = parse_index(map_listed(name, manifests.record(name), options), name)
    remembered(name, "index checked", lambda: _verified(index, name))
    info = store.info(prefix_url + ".bin")
    check_bin_size(index, info.size_bytes, prefix_url)
    return index, info


def _verified(index: Index, name: str) -> bool:
    verify_index(index, name)
    return True


class IndexedDataset:
    """Random access to the sequences of PREFIX.bin and PREFIX.idx, or of a virtual dataset.

    reader: how to read tokens, see `readers`. By default a local pair is mapped, and a remote one
    is read in ranges, through blocks that are cached on this node. cache: options of that cache.
    What a manifest lists is compared with it as it is read: the .idx here, each block of the .bin
    when the first of its tokens is read; ArtifactError if they differ.
    Works in several threads and after a fork; pickles as its prefix, so sending one to a worker
    process costs nothing."""

    def __init__(
        self,
        prefix_url: str,
        reader: Reader = "auto",
        cache: CacheOptions | None = None,
        manifests: Manifests | None = None,
    ) -> None:
        """manifests: those that were read for other pairs, perhaps of the same folder."""
        self.prefix = prefix_url
        self._arguments = (prefix_url, reader, cache)
        options, manifests = cache or CacheOptions(), manifests or Manifests()
        self._virtual = find_virtual(prefix_url, manifests)
        self._reader: TokenReader
        if self._virtual is not None:
            check_sizes(self._virtual, manifests)
            self.index = joined_index(self._virtual, options)
            self._reader = PartsReader(self._virtual, reader, options)
        else:
            self.index, info = _read_pair(prefix_url, options, manifests)
            self._reader = open_checked(
                reader, prefix_url, info, self.index.dtype, options, manifests
            )

    def __reduce__(self) -> tuple[Callable[..., IndexedDataset], tuple[Any, ...]]:
        return IndexedDataset, self._arguments

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
    def sequence_offsets(self) -> npt.NDArray[np.int64]:
        """(S,) byte offset of each sequence in the .bin."""
        return self.index.sequence_offsets

    @property
    def modes(self) -> npt.NDArray[np.int8] | None:
        """(S,) 0 text, 1 image; None for a file of text alone."""
        return self.index.modes

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.index.bin_bytes // self.dtype.itemsize

    @property
    def tokens(self) -> Tokens | None:
        """All tokens of the .bin, if one map holds them, for callers that read many places; `check`
        them first."""
        return self._reader.flat

    @property
    def is_mapped(self) -> bool:
        """Whether a read only accesses memory, so that announcing it gains nothing."""
        return self._reader.is_mapped

    def remember(self, what: str, compute: Callable[[], object]) -> object:
        """The result of `compute`, which depends on nothing but the index; a host computes it once
        for a version of a large one. what: names the result; it must be JSON-able."""
        if self._virtual is None:
            return remembered(f"{self.prefix}.idx", what, compute)
        if not self._virtual.is_recorded:
            return compute()
        return remembered(self._virtual.url, what, compute, self._virtual.index_bytes)

    def check(self, start: int, end: int) -> None:
        """Compare tokens `start` up to `end` of the .bin with the digests of their blocks, if there
        are any, before they are taken from `tokens`. The other methods do it themselves."""
        if isinstance(self._reader, CheckedReader):
            self._reader.check(start, end)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Tokens:
        """`length` tokens (default: all) of sequence `i` from `offset` on; do not write to them."""
        return self._reader.read(*self._place(i, offset, length))

    def prefetch(self, pieces: Iterable[tuple[int, int, int | None]]) -> None:
        """Announce pieces (sequence, offset, length) that will be read soon; returns at once.

        Begins to fetch remote tokens; readers may ignore it."""
        self._reader.prefetch([self._place(*piece) for piece in pieces])

    def document_places(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(n,) where each document begins in the .bin, in tokens; of `num_documents`, where the
        last one ends."""
        sequences = self.document_indices[documents]
        if not len(self):
            return np.zeros(len(sequences), np.int64)
        is_end = sequences == len(self)
        begins = self.sequence_offsets[sequences - is_end]
        places: npt.NDArray[np.int64] = begins // self.dtype.itemsize
        places += is_end * self.sequence_lengths[-1]
        return places

    def get_flat(self, start: int, end: int) -> Tokens:
        """Tokens `start` up to `end` of the .bin, all sequences end to end; do not write to
        them."""
        return self._reader.read(start, end)

    def _place(self, i: int, offset: int, length: int | None) -> tuple[int, int]:
        if not 0 <= i < len(self.index.sequence_lengths):
            raise IndexError(f"sequence {i} of {self.prefix}: there are {len(self)}")
        available = int(self.index.sequence_lengths[i])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(f"tokens {offset} to {stop} of sequence {i}, which has {available}")
        start = int(self.index.sequence_offsets[i]) // self.index.dtype.itemsize
        return start + offset, start + stop

    def documents(self) -> Iterator[list[Tokens]]:
        """Every document as its sequences, in order."""
        for first, last in itertools.pairwise(self.document_indices.tolist()):
            yield [self.get(i) for i in range(first, last)]
