"""Samples of a GPT with the neighbours of their chunks, read for a whole batch at once.

n samples, l chunks of a sample, m tokens of a chunk, k neighbours of a chunk, c chunks of a
neighbour: itself and those that follow it in its document, r = c m."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.sample_format import Sample, first
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase
from trainyard.retrieval.neighbors import Neighbors
from trainyard.retrieval.shape import NeighborShape

Ints = NDArray[np.int64]

PROBED_CHUNKS = 1 << 16
"""Chunks of a database whose length is looked at."""


class RetroSamples:
    """A `datasets.sample_format.Dataset`: samples have `neighbor_tokens` (l, k, r) int64 and
    `neighbor_lengths` (l, k) int64 as well."""

    def __init__(
        self,
        samples: GPTDataset | BlendedDataset,
        neighbors: Neighbors,
        database: ChunkDatabase,
        shape: NeighborShape,
    ) -> None:
        """neighbors: of the chunks of `samples`, which the caller checked.

        Raises ConfigError for a table with too few neighbours, or chunks of another length."""
        self.samples, self.neighbors, self.database = samples, neighbors, database
        self.shape = shape
        check_count(neighbors, shape)
        _check_length(database, shape)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return first(self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> Sample:
        """Several samples, stacked."""
        tokens, lengths = self.neighbors_of(np.array(indices, np.int64))
        return {
            **self.samples.__getitems__(indices),
            "neighbor_tokens": tokens,
            "neighbor_lengths": lengths,
        }

    def neighbors_of(self, samples: Ints) -> tuple[Ints, Ints]:
        """Tokens (n, l, k, r) of the neighbours of these samples, padded with 0, and their lengths
        (n, l, k). Raises ArtifactError for a neighbour that is no chunk of the database."""
        shape = self.shape
        numbers = samples[:, None] * shape.chunks_per_sample + np.arange(shape.chunks_per_sample)
        chunk = self.neighbors.rows(numbers)[..., : shape.num_neighbors]  # (n, l, k)
        self.database.check_neighbors(chunk, self.neighbors.url)
        chain = [chunk]
        for _ in range(shape.num_retrieved_chunks - 1):
            chunk = self.database.continuations(chunk)
            chain.append(chunk)
        chunks = np.stack(chain, axis=-1)  # (n, l, k, c)
        tokens = self.database.token_rows(chunks, shape.chunk_length, pad=0)
        # Only the last chunk of a document is shorter, so the tokens are without a gap.
        lengths = self.database.lengths(chunks).sum(axis=-1)
        return tokens.reshape(*lengths.shape, -1), lengths

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""
        self.samples.prefetch(indices)

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2) source and number of each sample."""
        return self.samples.ids(indices)


def check_count(neighbors: Neighbors, shape: NeighborShape) -> None:
    """Raise ConfigError for a table with fewer neighbours than a chunk is to have."""
    if shape.num_neighbors > neighbors.k:
        raise ConfigError(
            f"--retro-num-neighbors ({shape.num_neighbors}): {neighbors.url} has {neighbors.k} "
            "for each chunk; lower it, or run faiss_query with a larger "
            "--retro-query-num-neighbors-save"
        )


def _check_length(database: ChunkDatabase, shape: NeighborShape) -> None:
    probed = np.arange(min(len(database), PROBED_CHUNKS))
    lengths = database.lengths(probed)
    full = lengths[database.continuations(probed) != NO_CHUNK]
    wrong = [*full[full != shape.chunk_length], *lengths[lengths > shape.chunk_length]]
    if wrong:
        raise ConfigError(
            f"--retro-chunk-length ({shape.chunk_length}): {database.url} has chunks of "
            f"{wrong[0]} tokens; give their length, with which the database was built"
        )
