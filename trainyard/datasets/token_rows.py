"""Gathers the pieces of documents that make up samples into rows of tokens.

A piece is the part of one document in one sample; rows have the token type of the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets.masks import Segments
from trainyard.datasets.sample_format import SampleFormat

Read = Callable[[int, int, int], NDArray[Any]]
"""(sequence, offset, length) -> tokens."""

Refuse = Callable[[int, int], None]
"""(row, token) -> raises an error that names the origin of that token."""

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class TokenSource(Protocol):
    """Numbered sequences of tokens: an `IndexedDataset`, or a substitute such as `MockTokens`."""

    @property
    def prefix(self) -> str:
        """Its name in messages."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """(S,) tokens of each sequence."""

    def __len__(self) -> int:
        """Sequences."""

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens of one sequence."""


def reader(indexed: TokenSource) -> Read:
    """A function that reads tokens; for a mapped file a faster one than `get`."""
    flat = getattr(indexed, "tokens", None)
    if flat is None or not isinstance(indexed, IndexedDataset):
        return indexed.get
    begin_of, size, check = indexed.index.sequence_offsets.item, flat.itemsize, indexed.check

    def read(sequence: int, offset: int, length: int) -> NDArray[Any]:
        begin = begin_of(sequence) // size + offset
        check(begin, begin + length)
        piece: NDArray[Any] = flat[begin : begin + length]
        return piece

    return read


def is_mapped(indexed: TokenSource) -> bool:
    """Whether a read only accesses memory, so that announcing it gains nothing."""
    return not isinstance(indexed, IndexedDataset) or indexed.is_mapped


def checked_text(
    text: NDArray[Any], bounds: list[list[int]], sample_format: SampleFormat, refuse: Refuse
) -> NDArray[Any]:
    """The gathered rows, checked and padded with the pad id."""
    length = sample_format.text_length
    partial = [row for row, pieces in enumerate(bounds) if pieces[-1] < length]
    for row in partial:
        text[row, bounds[row][-1] :] = 0
    unsigned = text.view(UNSIGNED[text.itemsize])  # a negative id is a huge one
    if text.size and np.maximum.reduce(unsigned, axis=None) >= sample_format.vocab_size:
        row, column = np.argwhere(unsigned >= sample_format.vocab_size)[0].tolist()
        refuse(row, int(text[row, column]))
    if not partial:
        return text
    wide = text.astype(np.int64)  # the pad id need not fit the type of the file
    for row in partial:
        wide[row, bounds[row][-1] :] = sample_format.pad
    return wide


def segments_of_pieces(bounds: list[list[int]], sample_format: SampleFormat) -> Segments | None:
    """Documents of the (b, s) tokens by the pieces that samples were gathered from, if they are
    requested; padding continues the last one."""
    if not sample_format.inter_document_masking:
        return None
    s = sample_format.seq_length
    begins = [
        row * s + begin
        for row, pieces in enumerate(bounds)
        for begin in sorted({begin for begin in pieces if begin < min(s, pieces[-1])} | {0})
    ]
    return Segments.of(np.array(begins, np.int64), (len(bounds), s))
