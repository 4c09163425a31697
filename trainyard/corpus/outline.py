"""Reads the header and sizes of a pair of token files, local or remote: a few hundred bytes.

They show that a file is missing, truncated or from another run before anything large is loaded.
`indexed` reads and checks every entry. Of a virtual dataset the same is read of the parts that are
asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from trainyard.artifacts import store
from trainyard.artifacts.inputs import Manifests
from trainyard.corpus.layout import HEADER, Index, index_of
from trainyard.corpus.remote import LazyArray
from trainyard.corpus.virtual import VirtualDataset, find_virtual
from trainyard.corpus.virtual_reader import wrong_part


@dataclass(frozen=True, slots=True)
class Outline:
    """A pair, or a virtual dataset, whose header and sizes agree."""

    dtype: np.dtype[Any]
    """Type of a token."""
    num_sequences: int
    is_whole: bool
    """Whether the .bin is as long as the .idx says."""
    span: Callable[[int], tuple[int, int]]
    """The first token of a sequence, and the one after its last, among those of all."""

    def count_tokens(self, first: int, last: int) -> int:
        """Tokens of the sequences from `first` up to `last`, at least one of them."""
        return self.span(last - 1)[1] - self.span(first)[0]


def outline(prefix_url: str, manifests: Manifests | None = None) -> Outline:
    """The outline of a pair or a virtual dataset; ArtifactError for a missing file, or an .idx that
    is not one. manifests: those that were read for others."""
    manifests = manifests or Manifests()
    virtual = find_virtual(prefix_url, manifests)
    return _of_pair(prefix_url) if virtual is None else _of_parts(virtual, manifests)


def _of_pair(prefix_url: str) -> Outline:
    url = prefix_url + ".idx"
    found = store.info(url)

    def read(begin: int, end: int) -> bytes:
        return store.read_range(url, begin, end, found.version)

    header = read(0, min(HEADER.size, found.size_bytes))
    index = index_of(header, found.size_bytes, partial(LazyArray, read), url)
    is_whole = store.info(prefix_url + ".bin").size_bytes == index.bin_bytes
    return Outline(index.dtype, len(index.sequence_lengths), is_whole, partial(_span, index))


def _span(index: Index, sequence: int) -> tuple[int, int]:
    begin = int(index.sequence_offsets[sequence]) // index.dtype.itemsize
    return begin, begin + int(index.sequence_lengths[sequence])


def _of_parts(virtual: VirtualDataset, manifests: Manifests) -> Outline:
    firsts = list(accumulate((part.sequences for part in virtual.parts), initial=0))
    tokens = virtual.token_bounds
    outline_of = lru_cache(maxsize=2)(_of_pair)  # of the first sequence and of the last

    def span(sequence: int) -> tuple[int, int]:
        number = bisect_right(firsts, sequence) - 1
        found = outline_of(virtual.parts[number].prefix)
        begin, end = found.span(sequence - firsts[number])
        return begin + tokens[number], end + tokens[number]

    return Outline(virtual.dtype, firsts[-1], not wrong_part(virtual, manifests), span)
