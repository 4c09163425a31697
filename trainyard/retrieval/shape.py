"""How many tokens a sample retrieves. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.errors import ConfigError


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

    def check_counts(self, chunks: Sequence[Sequence[object]], length: int) -> None:
        """Refuse neighbours of chunks that a text of this many tokens does not have, and more
        neighbours of a chunk than the model takes."""
        whole = length // self.chunk_length
        if not chunks or len(chunks) > whole:
            raise ConfigError(
                f"neighbours of {len(chunks)} chunks were given, and a text of {length} tokens has "
                f"{whole} whole chunks of {self.chunk_length}; give at most as many"
            )
        if (most := max(map(len, chunks))) > self.num_neighbors:
            raise ConfigError(
                f"{most} neighbours of a chunk were given, and the model takes "
                f"{self.num_neighbors} (--retro-num-neighbors); leave the last ones out"
            )
