"""Options of `python -m stages.faiss_add`, by the names of Megatron-LM's Retro tools."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_RANKS,
    check_above_zero,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissAddConfig(FolderInShares):
    """Add embeddings to a trained index; the id of each is its place. Then compare what the index
    finds with exact search.

    To add to a filled index, give it as --index, and its embeddings before the new ones. It is
    copied, and stays as it is."""

    index: str = location()
    """Folder or URL of an index of faiss_train or faiss_add."""
    embeddings: tuple[str, ...] = location()
    """Folders or URLs of all embeddings, in the order of their ids: first those that --index holds
    already, if it does, then those to add."""
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
    rank: int | None = execution(None)
    """With --world-size: add only this share of the new embeddings, from 0. Shares may run at the
    same time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""
    keep_shards: bool = False
    """With --world-size: leave each share in a file of its own, for faiss_query to search as one
    index."""
    retro_task_validate: float | None = execution(None)
    """Write nothing: encode this share of the blocks again, a seeded sample, and compare with what
    the index in --output-dir holds."""
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
        check_at_least(self, 1, "world_size")
        check_at_most(self, MAX_RANKS, "world_size")
        check_share(self)
        if not self.embeddings:
            raise ConfigError("--embeddings names no folder")
        for name in ("retro_index_add_load_fraction", "target_recall", "retro_min_recall"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "retro_index_add_load_fraction" and value == 0):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is a share, from 0 to 1, got {value}"
                )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The trained index and the embeddings."""
        return {"index": (self.index,), "embeddings": self.embeddings}

    def output(self) -> Output | None:
        """The folder of the index, or of a share; None if blocks are only compared."""
        if self.retro_task_validate is not None:
            return None
        return self.own_folder()


def check_share(config: FaissAddConfig) -> None:
    """Refuse shares that cannot be."""
    if config.keep_shards and config.world_size is None:
        raise ConfigError("--keep-shards needs --world-size, the number of shares")
    share = config.retro_task_validate
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"--retro-task-validate is a share of the blocks, above 0 and at most 1, got {share}"
        )
    if share is not None and config.rank is not None:
        raise ConfigError("--retro-task-validate checks a whole output; leave --rank out")
    config.check_rank()
