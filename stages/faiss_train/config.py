"""Options of `python -m stages.faiss_train`, by the names of Megatron-LM's Retro tools."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import check_above_zero, check_at_least, check_at_most, location
from trainyard.errors import ConfigError
from trainyard.retrieval.index_choice import AUTO, check_points

MOST_VECTORS = 1 << 40
"""Of an index: over fifty times the chunks of the largest database in use (InstructRetro)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissTrainConfig:
    """Train an index, still empty, on embeddings; faiss_add fills it."""

    embeddings: str = location()
    """Folder or URL of the embeddings to train on: those of the sampled chunks, or of all."""
    retro_index_str: str = AUTO
    """The index, in the words of faiss's index_factory, such as IVF4096,SQ8 or
    OPQ32_64,IVF65536_HNSW8,PQ32; auto: chosen by the number of vectors."""
    retro_index_ntrain: int | None = None
    """Vectors to train on, a seeded sample of the embeddings; default: as many as the index can
    use, 256 for each of its lists."""
    retro_index_train_load_fraction: float = 1.0
    """Share of the embeddings that the sample is drawn from, counted from the first."""
    index_size: int | None = None
    """Vectors that the index is to hold, which decides about auto and the estimates; default: the
    number of embeddings given here."""
    seed: int = 1234
    """Seed of the sample."""
    output_dir: str = location()
    """Folder or URL for the index."""

    def __post_init__(self) -> None:
        """Refuse values that no index can have."""
        if not self.retro_index_str.strip():
            raise ConfigError("--retro-index-str is empty; leave it out for one that fits")
        check_above_zero(self, "retro_index_ntrain", "index_size")
        check_at_most(self, MOST_VECTORS, "index_size")
        check_at_least(self, 0, "seed")
        if not 0 < self.retro_index_train_load_fraction <= 1:
            raise ConfigError(
                "--retro-index-train-load-fraction must be above 0 and at most 1, got "
                f"{self.retro_index_train_load_fraction}"
            )

    def check_sample(self, num_sampled: int, source: str) -> None:
        """Refuse an index that so many embeddings cannot train, before there are any.

        source: what decides how many there are."""
        available = math.ceil(num_sampled * self.retro_index_train_load_fraction)
        if self.retro_index_ntrain is not None and self.retro_index_ntrain < available:
            available, source = self.retro_index_ntrain, "--retro-index-ntrain of faiss_train"
        elif self.retro_index_train_load_fraction < 1:
            source += f" with its load fraction {self.retro_index_train_load_fraction}"
        check_points(self.retro_index_str, available, source, "raise it")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The embeddings."""
        return {"embeddings": (self.embeddings,)}

    def output(self) -> Output:
        """The folder of the index."""
        return Output.directory(self.output_dir)
