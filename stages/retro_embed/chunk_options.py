"""Which chunks are embedded: options of a database, or of the samples of a training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.urls import join
from trainyard.config import also, check_at_least, location, one_of
from trainyard.datasets.config import parse_blend
from trainyard.errors import ConfigError
from trainyard.training.options.samples import RunSamplesConfig

ChunkKind = Literal["train", "sampled", "valid", "pretraining"]

INFOS = "indexed_dataset_infos.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions(ABC):
    """Which chunks are embedded."""

    chunks: ChunkKind = "train"
    """Which ones. train: those that can be retrieved; sampled: those that train the index; valid:
    those of all other documents; pretraining: those of the samples of a training, for the query."""

    @abstractmethod
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Where they come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseChunks(ChunkOptions):
    """Chunks of a database; `--chunks pretraining --help` has the options of a training's."""

    retro_db: str = location()
    """Folder or URL of the database, from retro_db."""
    data_path: tuple[str, ...] = also("retro_gpt_data_path", role="location")
    """Prefixes of the .bin/.idx pairs that it was cut from, in the same order; weights do not
    count. Also --retro-gpt-data-path."""

    retro_base_db: str | None = location(None)
    """With --chunks train: embed only the chunks that come after those of this database, which is
    the one that --retro-db was made from by --retro-base-db."""

    def __post_init__(self) -> None:
        if self.retro_base_db is not None and self.chunks != "train":
            raise ConfigError("--retro-base-db is for --chunks train; leave it out")

    def prefixes(self) -> list[str]:
        """The token files, without weights."""
        found = [source.prefix for source in parse_blend(self.data_path, "--data-path")]
        if not found:
            raise ConfigError("--data-path names no pair of token files")
        return found

    @property
    def merged(self) -> str:
        """Name of the database's file."""
        return f"merged/{self.chunks}.hdf5"

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The file of these chunks, the list of datasets, and every prefix."""
        files = (join(self.retro_db, self.merged), join(self.retro_db, INFOS))
        base = self.retro_base_db
        return {
            "retro_db": files,
            **({} if base is None else {"base": (join(base, self.merged),)}),
            **{f"data_{i}": (prefix,) for i, prefix in enumerate(self.prefixes())},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChunks(ChunkOptions):
    """Chunks of the samples that a training takes from one split, in its order."""

    samples: RunSamplesConfig
    retro_query_split: Literal["train", "valid", "test"] = "train"
    """With --chunks pretraining: whose samples, those for training, validation or the test."""
    retro_gpt_chunk_length: int = 64
    """With --chunks pretraining: GPT tokens of a chunk; divides --seq-length."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "retro_gpt_chunk_length")
        length, seq_length = self.retro_gpt_chunk_length, self.samples.seq_length
        if seq_length % length:
            raise ConfigError(
                f"--seq-length ({seq_length}) must be divisible by --retro-gpt-chunk-length "
                f"({length})"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Every prefix of token files."""
        return self.samples.data.inputs()


CHUNKS = one_of(
    "chunks",
    {
        "train": DatabaseChunks,
        "sampled": DatabaseChunks,
        "valid": DatabaseChunks,
        "pretraining": SampleChunks,
    },
)
"""Metadata of a field with one of the two."""
