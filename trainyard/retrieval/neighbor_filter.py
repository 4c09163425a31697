"""Which of the chunks that a search finds become neighbours. Pure but for the database's arrays.

n chunks are searched for, k found for each, nearest first; -1 is no chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

DOCUMENT_BITS = 40
"""Of a key of dataset and document."""


class DocumentChunks:
    """The chunks of each document of a database, which are consecutive."""

    def __init__(self, database: ChunkDatabase) -> None:
        offsets = database.doc_offsets
        assert offsets is not None, "neighbours come from the database for training"
        keys = _key(offsets[:, 0], offsets[:, 1])
        order = np.argsort(keys, kind="stable")
        ends = offsets[:, 2].astype(np.int64)
        self._keys = keys[order]
        self._begins = np.concatenate(([0], ends[:-1]))[order]
        self._ends = ends[order]

    def ranges(self, dataset: Ints, document: Ints) -> tuple[Ints, Ints]:
        """(n,) first chunk and end of each document; both 0 for one that the database lacks."""
        keys = _key(dataset, document)
        if not len(self._keys):
            return np.zeros_like(keys), np.zeros_like(keys)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        is_there = self._keys[places] == keys
        return self._begins[places] * is_there, self._ends[places] * is_there


@dataclass(frozen=True, slots=True)
class OwnChunks:
    """The chunks of the database that come from the documents of some samples."""

    samples: Ints
    """(m,) sample of each range."""
    begins: Ints
    ends: Ints
    """(m,) the range of chunks, of one document."""
    num_chunks: int
    """In the database."""

    def among(self, ids: Ints, samples: Ints) -> Bools:
        """(n, k) whether each chunk is of a document of its row's sample.

        ids: (n, k). samples: (n,) the sample of each row."""
        some = self.begins < self.ends
        if not some.any():
            return np.zeros(ids.shape, np.bool_)
        # Samples one after another on one axis: a range lies within the part of its sample.
        width = self.num_chunks + 1
        first = int(min(samples.min(), self.samples.min()))
        order = np.lexsort((self.begins[some], self.samples[some]))
        base = (self.samples[some][order] - first) * width
        begins, ends = base + self.begins[some][order], base + self.ends[some][order]
        keys = (samples - first)[:, None] * width + ids
        places = np.searchsorted(begins, keys, "right") - 1
        is_own: Bools = (places >= 0) & (keys < ends[places]) & (ids != NO_CHUNK)
        return is_own


def keep_nearest(ids: Ints, distances: Floats, allowed: Bools, count: int) -> tuple[Ints, Floats]:
    """(n, count) the first allowed neighbours of each row and their distances; behind them -1 and
    infinity."""
    rank = np.cumsum(allowed, axis=1)
    row, column = np.nonzero(allowed & (rank <= count))
    place = rank[row, column] - 1
    kept = np.full((len(ids), count), NO_CHUNK, np.int64)
    lengths = np.full((len(ids), count), np.inf, np.float32)
    kept[row, place] = ids[row, column]
    lengths[row, place] = distances[row, column]
    return kept, lengths


def _key(dataset: NDArray[np.integer], document: NDArray[np.integer]) -> Ints:
    key: Ints = (dataset.astype(np.int64) << DOCUMENT_BITS) | document.astype(np.int64)
    return key
