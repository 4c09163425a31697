"""Adds their neighbours to the samples of a training, once the table of neighbours is known to be
of these samples and this database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainyard.artifacts import inputs
from trainyard.corpus.indexed import CacheOptions
from trainyard.datasets.config import SPLIT_NAMES, DataConfig
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.sample_format import Dataset
from trainyard.datasets.splits import cache_options
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_sources import find_datasets, prefixes_of_all
from trainyard.retrieval.hdf5 import merged_name
from trainyard.retrieval.neighbors import Neighbors
from trainyard.retrieval.options import RetrievalConfig
from trainyard.retrieval.pretraining_chunks import PretrainingChunks, check_data, num_served
from trainyard.retrieval.retro_samples import RetroSamples, check_count
from trainyard.retrieval.shape import NeighborShape


@dataclass(frozen=True, slots=True)
class RunNeighbors:
    """The neighbours of a run, opened once for all its splits."""

    config: RetrievalConfig
    data: DataConfig
    shape: NeighborShape
    database: ChunkDatabase
    database_digest: str
    cache: CacheOptions

    @staticmethod
    def open(config: RetrievalConfig, data: DataConfig, shape: NeighborShape) -> RunNeighbors:
        """Raises ConfigError for data whose samples have no neighbours, and for a database of
        other token files."""
        config = config.located()
        assert config.retro_db is not None, "the options of a run were checked"
        check_data(data)
        cache = cache_options(data)
        digest = inputs.resolve("retro_db", (config.retro_db,)).digest
        prefixes = config.retro_db_data_path or _cut_from(config.retro_db, data)
        database = ChunkDatabase(config.retro_db, prefixes, cache=cache)
        return RunNeighbors(config, data, shape, database, digest, cache)

    def has(self, split: str) -> bool:
        """Whether there is a table of a split."""
        return self.config.neighbors_of(split) is not None

    def join(self, split: str, samples: Dataset, wanted: int) -> Dataset:
        """The samples of a split with their neighbours. wanted: as the dataset was built for.

        Raises ConfigError for a table of other samples, or of another database."""
        url = self.config.neighbors_of(split)
        if url is None:
            raise ConfigError(
                f"{self.config.retro_project_dir}: retro_neighbor_dirs of config.json names no "
                f"neighbours for {split}; name them there, or with --retro-{split}-neighbors"
            )
        assert isinstance(samples, GPTDataset | BlendedDataset), type(samples)
        neighbors = Neighbors(url, self.cache)
        size = num_served(self.data, split, wanted, len(samples))
        chunks = PretrainingChunks(samples, split, self.shape.chunk_length, size)
        neighbors.check(chunks.identity(), self.database_digest)
        return RetroSamples(samples, neighbors, self.database, self.shape)


def check_tables(
    config: RetrievalConfig, data: DataConfig, shape: NeighborShape, splits: Sequence[str]
) -> None:
    """Refuse a damaged database, and tables that cannot be of this run, by what they say of
    themselves. `RunNeighbors` compares the samples as well."""
    check_data(data)
    found = config.located()
    assert found.retro_db is not None, "the options of a run were checked"
    inputs.check_version(found.retro_db, merged_name("train"))
    digest = inputs.resolve("retro_db", (found.retro_db,)).digest
    for split in splits:
        if (url := found.neighbors_of(split)) is None:
            continue
        table = Neighbors(url)
        theirs = table.document.samples
        wanted = replace(
            theirs, split=split, seq_length=shape.seq_length, chunk_length=shape.chunk_length
        )
        table.check(wanted, digest)
        check_count(table, shape)


def _cut_from(database_url: str, data: DataConfig) -> Sequence[str]:
    """The prefixes of the database's token files, found among those of the run."""
    expanded = data.expanded()
    sources = (source for split in SPLIT_NAMES for source in expanded.sources(split))
    prefixes = list(dict.fromkeys(source.prefix for source in sources))
    found = prefixes_of_all(database_url, prefixes, find_datasets(database_url, prefixes))
    if found is None:
        raise ConfigError(
            f"--retro-db {database_url} was cut from token files that are not all among those of "
            "this run; name them with --retro-db-data-path, in the order of --data-path of retro_db"
        )
    return found
