"""Options of `python -m stages.faiss_query`, by the names of Megatron-LM's Retro tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
from trainyard.training.options.samples import RunSamplesConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissQueryConfig(FolderInShares):
    """Find the neighbours of every chunk of a training's samples. Give the options of the training
    that decide its samples. No neighbour comes from a document of the sample itself."""

    samples: RunSamplesConfig
    index: str = location()
    """Folder or URL of an index of faiss_add."""
    embeddings: str = location()
    """Folder or URL of the embeddings of the samples' chunks, in the order of the training."""
    retro_db: str = location()
    """Folder or URL of the chunk database that the index was built from."""
    retro_query_split: Literal["train", "valid", "test"] = "train"
    """Whose samples: those for training, validation or the test."""
    retro_gpt_chunk_length: int = 64
    """GPT tokens of a chunk; divides --seq-length."""
    retro_query_num_neighbors_query: int = 200
    """Chunks to find for each chunk, before those of its own documents are dropped."""
    retro_query_num_neighbors_save: int = 20
    """Neighbours to keep; where fewer are left, -1 stands behind them."""
    retro_query_ef_search: int = 256
    """Lists that the graph of a coarse quantizer considers, nprobe at least."""
    retro_query_nprobe: int | None = None
    """Lists that a search visits; default: that of the index, chosen by its recall."""
    retro_query_gpus: Literal["all"] | None = None
    """all: search on all GPUs of the machine, with a build of faiss for them; default: the CPU.
    Neighbours at nearly equal distances may change places."""
    retro_block_size: int = 100000
    """Chunks of a block: a file, and what a killed run keeps."""
    retro_exclude_evaluation: tuple[str, ...] = location(())
    """Prefixes of token files of evaluation sets, made with the tokenizer of the database. A chunk
    that repeats --retro-exclude-run tokens of them is no neighbour."""
    retro_exclude_run: int = 32
    """Consecutive tokens that a chunk and an evaluation set must share. Shorter documents of a set
    exclude nothing."""
    retro_db_data_path: tuple[str, ...] = location(())
    """Prefixes that the database was cut from, in its order, for --retro-exclude-evaluation and for
    the examples of the run card; default: those of the samples."""
    rank: int | None = execution(None)
    """With --world-size: search only for the blocks of this share, from 0. Shares may run at the
    same time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""
    retro_task_validate: float | None = execution(None)
    """Write nothing: search for this share of the blocks in --output-dir again, a seeded sample,
    and compare."""
    output_dir: str = location()
    """Folder or URL for the table of neighbours."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        check_above_zero(
            self,
            *("retro_gpt_chunk_length", "retro_query_num_neighbors_query", "retro_block_size"),
            *("retro_query_num_neighbors_save", "retro_query_ef_search", "retro_query_nprobe"),
            "retro_exclude_run",
        )
        query, save = self.retro_query_num_neighbors_query, self.retro_query_num_neighbors_save
        if save > query:
            raise ConfigError(
                f"--retro-query-num-neighbors-save ({save}) must be at most "
                f"--retro-query-num-neighbors-query ({query}): neighbours are kept of what is found"
            )
        part = self.retro_task_validate
        if part is not None and not 0 < part <= 1:
            raise ConfigError(
                f"--retro-task-validate is a share of the blocks, above 0 and at most 1, got {part}"
            )
        if part is not None and self.retro_query_gpus is not None:
            raise ConfigError(
                "--retro-task-validate compares neighbours one by one, and on GPUs those at nearly "
                "equal distances may change places: a table of --retro-query-gpus is not validated"
            )
        if part is not None and self.world_size is not None:
            raise ConfigError("--retro-task-validate checks a whole output; leave --world-size out")
        check_at_least(self, 1, "world_size")
        check_at_most(self, MAX_RANKS, "world_size")
        self.check_rank()
        length, seq_length = self.retro_gpt_chunk_length, self.samples.seq_length
        if seq_length % length:
            raise ConfigError(
                f"--seq-length ({seq_length}) must be divisible by --retro-gpt-chunk-length "
                f"({length})"
            )
        if self.retro_exclude_evaluation and self.retro_exclude_run > length:
            raise ConfigError(
                f"--retro-exclude-run ({self.retro_exclude_run}) must be at most "
                f"--retro-gpt-chunk-length ({length}): no chunk has more tokens"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The index, the embeddings, the database, every prefix of token files."""
        return {
            **self.samples.data.inputs(),
            "index": (self.index,),
            "embeddings": (self.embeddings,),
            "retro_db": (self.retro_db,),
            **{f"evaluation_{i}": (p,) for i, p in enumerate(self.retro_exclude_evaluation)},
            **{f"db_data_{i}": (p,) for i, p in enumerate(self.retro_db_data_path)},
        }

    def output(self) -> Output | None:
        """The folder of the table, or of a share; None if blocks are only compared."""
        if self.retro_task_validate is not None:
            return None
        return self.own_folder()
