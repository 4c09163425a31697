"""The search for the neighbours of a block of chunks, and the choice among what it finds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ArtifactError
from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase
from trainyard.retrieval.index_gpus import OnGpus
from trainyard.retrieval.neighbor_filter import DocumentChunks, OwnChunks, keep_nearest
from trainyard.retrieval.pretraining_chunks import PretrainingChunks
from trainyard.retrieval.shards import Shards
from trainyard.retrieval.vectors import EmbeddingBlocks, Vectors

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

ROWS = 4096
"""Vectors that are searched for at once."""

WARM_UP_ROWS = 8


class Counts(NamedTuple):
    """What a search found, over all chunks."""

    found: int = 0
    own: int = 0
    """Of these, the ones from documents of the chunk's sample."""
    evaluation: int = 0
    """Of these, the ones that repeat an evaluation set."""
    kept: int = 0
    """Neighbours in the table."""
    fewer: int = 0
    """Chunks with fewer neighbours than the table has columns."""
    none: int = 0
    """Chunks without any."""

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts)
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(slots=True)
class Search:
    """An index with the settings of a search."""

    index: Shards
    nprobe: int
    ef_search: int
    num_found: int
    on_gpus: OnGpus | None = None
    """A copy of the index, which answers until it fails."""

    def __call__(self, vectors: Vectors) -> tuple[Floats, Ints]:
        """Distances and chunks, both (n, found), nearest first; -1 where there are no more."""
        if self.on_gpus is not None:
            try:
                return self.on_gpus.search(vectors, self.num_found)
            except RuntimeError as error:  # such as no memory for what a search takes
                log.warning("searching on the CPU from now on: the GPUs failed: %s", error)
                self.on_gpus = None
        return self.index.search(vectors, self.num_found, self.nprobe, self.ef_search)

    def milliseconds(self, vectors: Vectors) -> float:
        """Of a search for one of these."""
        self(vectors[:WARM_UP_ROWS])
        began = time.monotonic()
        self(vectors)
        return 1000 * (time.monotonic() - began) / len(vectors)


@dataclass(frozen=True, slots=True)
class Rules:
    """Which chunks of the database may be neighbours of which chunks of the samples."""

    chunks: PretrainingChunks
    database: ChunkDatabase
    pairs: list[tuple[int, int]]
    """(dataset of the samples, dataset of the database) with the same documents."""
    excluded: NDArray[np.bool_] | None
    """(chunks of the database,) what may be no neighbour of any chunk."""


@dataclass(frozen=True, kw_only=True)
class BlockSearch:
    """Finds the neighbours of any chunks of the samples."""

    search: Search
    embeddings: EmbeddingBlocks
    rules: Rules
    num_kept: int

    @cached_property
    def _documents(self) -> DocumentChunks:
        return DocumentChunks(self.rules.database)

    def neighbors(
        self, start: int, stop: int, done: Callable[[int], object]
    ) -> tuple[Ints, Floats, Counts]:
        """(n, kept) neighbours and distances of the chunks from `start` up to `stop`.

        done: called with the number of chunks that were searched for since its last call."""
        ids = np.empty((stop - start, self.num_kept), np.int64)
        distances = np.empty(ids.shape, np.float32)
        counts = Counts()
        for first, vectors in self.embeddings.between(start, stop, ROWS):
            rows = slice(first - start, first - start + len(vectors))
            ids[rows], distances[rows], of_rows = self._of_rows(vectors, first)
            counts += of_rows
            done(len(vectors))
        return ids, distances, counts

    def _of_rows(self, vectors: Vectors, start: int) -> tuple[Ints, Floats, Counts]:
        distances, found = self.search(vectors)
        database = self.rules.database
        if found.size and not NO_CHUNK <= found.min() <= found.max() < len(database):
            raise ArtifactError(
                f"--index: it finds chunk {found.max() if found.min() >= NO_CHUNK else found.min()}"
                f", and {database.url} has {len(database)}; run faiss_add again"
            )
        samples = (start + np.arange(len(vectors))) // self.rules.chunks.chunks_per_sample
        own = self._own_chunks(int(samples[0]), int(samples[-1]) + 1).among(found, samples)
        allowed = (found != NO_CHUNK) & ~own
        repeats = 0
        if self.rules.excluded is not None:
            is_excluded = allowed & self.rules.excluded[found]
            repeats, allowed = int(is_excluded.sum()), allowed & ~is_excluded
        ids, lengths = keep_nearest(found, distances, allowed, self.num_kept)
        held = (ids != NO_CHUNK).sum(axis=1)
        counts = Counts(
            found=int((found != NO_CHUNK).sum()),
            own=int(own.sum()),
            evaluation=repeats,
            kept=int(held.sum()),
            fewer=int((held < self.num_kept).sum()),
            none=int((held == 0).sum()),
        )
        return ids, lengths, counts

    def _own_chunks(self, first: int, last: int) -> OwnChunks:
        """The chunks of the database from documents of these samples."""
        documents = self.rules.chunks.documents(first, last)
        samples, begins, ends = [], [], []
        for place, number in self.rules.pairs:
            mine = documents[documents[:, 1] == place]
            low, high = self._documents.ranges(np.full(len(mine), number), mine[:, 2])
            samples.append(mine[:, 0])
            begins.append(low)
            ends.append(high)
        empty = [np.zeros(0, np.int64)]
        return OwnChunks(
            np.concatenate(samples or empty),
            np.concatenate(begins or empty),
            np.concatenate(ends or empty),
            len(self.rules.database),
        )
