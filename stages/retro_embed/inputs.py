"""Checks the chunks and the encoder before torch is imported."""

from __future__ import annotations

import numpy as np

from stages.retro_embed.chunk_options import DatabaseChunks
from stages.retro_embed.config import RetroEmbedConfig
from trainyard.artifacts.inputs import check_in_folder
from trainyard.checkpoint.stored_step import check_step
from trainyard.conversion.detect import detect
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.index_choice import check_points


def check_inputs(config: RetroEmbedConfig) -> None:
    """Refuse a database that is damaged, without chunks or of other token files, and a damaged
    checkpoint."""
    if isinstance(config.source, DatabaseChunks):
        check_in_folder(config.source.retro_db, config.source.merged)
        database = open_database(config.source)
        num_in_base(config.source, database)
        if config.retro_index_str is not None:
            check_points(
                config.retro_index_str,
                len(database),
                database.url,
                "build the database with a larger --retro-index-ntrain or of more documents",
            )
    if config.load is not None and detect(config.load) in ("trainyard", None):
        check_step(config.load, "--load")


def open_database(source: DatabaseChunks) -> ChunkDatabase:
    """The database; ConfigError for one without chunks."""
    assert source.chunks != "pretraining"
    database = ChunkDatabase(source.retro_db, source.prefixes(), source.chunks)
    if not len(database):
        raise ConfigError(
            f"{database.url} has no chunk; take other --chunks, or build the database of more "
            "documents"
        )
    return database


def num_in_base(source: DatabaseChunks, database: ChunkDatabase) -> int:
    """How many chunks --retro-base-db has, the first ones of the database; 0 without it.

    Raises ConfigError for one that has others, or all."""
    if source.retro_base_db is None:
        return 0
    base = ChunkDatabase(source.retro_base_db)
    count = len(base)
    if count > len(database) or not np.array_equal(base.chunks, database.chunks[:count]):
        raise ConfigError(
            f"--retro-base-db {source.retro_base_db}: its chunks are not the first ones of "
            f"{source.retro_db}; give the database that this one was made from"
        )
    if count == len(database):
        raise ConfigError(
            f"--retro-base-db {source.retro_base_db} has all chunks of {source.retro_db}, so there "
            "is none to embed"
        )
    return count
