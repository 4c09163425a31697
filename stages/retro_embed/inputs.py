"""Checks the chunks and the encoder before torch is imported."""

from __future__ import annotations

from stages.retro_embed.chunk_options import DatabaseChunks
from stages.retro_embed.config import RetroEmbedConfig
from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_digest
from trainyard.artifacts.manifest import check_digest
from trainyard.checkpoint.stored_step import check_step
from trainyard.conversion.detect import detect
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_sources import database_manifest


def check_inputs(config: RetroEmbedConfig) -> None:
    """Refuse a database that is damaged, without chunks or of other token files, and a damaged
    checkpoint."""
    if isinstance(config.source, DatabaseChunks):
        _check_digest(config.source)
        open_database(config.source)
    if config.load is not None and detect(config.load) in ("trainyard", None):
        check_step(config.load, "--load")


def _check_digest(source: DatabaseChunks) -> None:
    """Read the chunks, and compare them with the manifest of their database, if it has one."""
    manifest = database_manifest(source.retro_db)
    record = None if manifest is None else manifest.record(source.merged)
    if record is not None:
        url = store.join(source.retro_db, source.merged)
        check_digest(url, record, read_digest(url))


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
