"""How many tokens a sample retrieves. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborShape:
    """Chunks of a sample and their neighbours."""

    seq_length: int
    chunk_length: int
    num_neighbors: int
    """Of each chunk."""
    num_retrieved_chunks: int
    """Of each neighbour: itself and those that follow it in its document."""

    @property
    def chunks_per_sample(self) -> int:
        """Chunks of a sample."""
        return self.seq_length // self.chunk_length

    @property
    def retrieved_length(self) -> int:
        """Tokens of a neighbour, padding included."""
        return self.num_retrieved_chunks * self.chunk_length
