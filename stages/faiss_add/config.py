"""Options of `python -m stages.faiss_add`, by the names of Megatron-LM's Retro tools."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import check_above_zero, check_at_least, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissAddConfig:
    """Add embeddings to a trained index; the id of each is its place. Then compare what the index
    finds with exact search."""

    index: str = location()
    """Folder or URL of an index of faiss_train."""
    embeddings: str = location()
    """Folder or URL of the embeddings to add."""
    retro_index_add_load_fraction: float = 1.0
    """Share of the embeddings to add, counted from the first, up to the end of a block."""
    retro_query_num_neighbors_save: int = 20
    """k of recall@k: neighbours that a search keeps."""
    retro_query_ef_search: int = 256
    """Lists that the graph of a coarse quantizer considers, nprobe at least."""
    retro_query_nprobe: int | None = None
    """Lists that a search visits; default: the fewest with --target-recall."""
    target_recall: float = 0.95
    """Recall for which the default of --retro-query-nprobe is chosen."""
    retro_min_recall: float = 0.0
    """Publish no index of less recall."""
    recall_sample: int = 500
    """Vectors that are searched for to measure recall. Each is compared with every vector."""
    seed: int = 1234
    """Seed of that sample."""
    output_dir: str = location()
    """Folder or URL for the filled index."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        check_above_zero(
            self,
            *("retro_query_num_neighbors_save", "retro_query_ef_search"),
            *("retro_query_nprobe", "recall_sample"),
        )
        check_at_least(self, 0, "seed")
        for name in ("retro_index_add_load_fraction", "target_recall", "retro_min_recall"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "retro_index_add_load_fraction" and value == 0):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is a share, from 0 to 1, got {value}"
                )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The trained index and the embeddings."""
        return {"index": (self.index,), "embeddings": (self.embeddings,)}

    def output(self) -> Output:
        """The folder of the index."""
        return Output.directory(self.output_dir)
