"""Reads the header and sizes of a pair of token files, local or remote: a few hundred bytes.

They show that a file is missing, truncated or from another run before anything large is loaded.
`indexed` reads and checks every entry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from trainyard.artifacts import store
from trainyard.corpus.layout import HEADER, Index, index_of
from trainyard.corpus.remote import LazyArray


@dataclass(frozen=True, slots=True)
class Outline:
    """A pair whose header and sizes agree."""

    index: Index
    """Its arrays are read entry by entry."""
    is_whole: bool
    """Whether the .bin is as long as the .idx says."""

    def count_tokens(self, first: int, last: int) -> int:
        """Tokens of the sequences from `first` up to `last`, at least one of them."""
        index = self.index
        begin, end = int(index.sequence_offsets[first]), int(index.sequence_offsets[last - 1])
        return (end - begin) // index.dtype.itemsize + int(index.sequence_lengths[last - 1])


def outline(prefix_url: str) -> Outline:
    """The outline of a pair; ArtifactError for a missing file, or an .idx that is not one."""
    url = prefix_url + ".idx"
    found = store.info(url)

    def read(begin: int, end: int) -> bytes:
        return store.read_range(url, begin, end, found.version)

    header = read(0, min(HEADER.size, found.size_bytes))
    index = index_of(header, found.size_bytes, partial(LazyArray, read), url)
    return Outline(index, store.info(prefix_url + ".bin").size_bytes == index.bin_bytes)
