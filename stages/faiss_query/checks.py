"""Refuses inputs that were not made for each other, and a search that does not fit in memory."""

from __future__ import annotations

import logging

from stages.faiss_query.config import FaissQueryConfig
from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_checked_json
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ConfigError
from trainyard.machine import memory_bytes
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_sources import database_manifest
from trainyard.retrieval.index_document import IndexDocument, shard_names
from trainyard.retrieval.pretraining_chunks import SAMPLES, PretrainingChunks, SamplesIdentity
from trainyard.retrieval.vectors import EmbeddingBlocks

log = logging.getLogger(__name__)


def check_together(
    config: FaissQueryConfig,
    document: IndexDocument,
    database: ChunkDatabase,
    chunks: PretrainingChunks,
    blocks: EmbeddingBlocks,
) -> None:
    """Refuse inputs that were not made for each other."""
    has_all = document.num_vectors == len(database)
    if not has_all and (document.add_fraction == 1 or document.num_vectors > len(database)):
        raise ConfigError(
            f"--index {config.index} holds {document.num_vectors:,} vectors, and --retro-db "
            f"{config.retro_db} has {len(database):,} chunks; give the index of this database, "
            "filled by faiss_add"
        )
    if blocks.dimensions != document.dimensions:
        raise ConfigError(
            f"--embeddings {config.embeddings}: of {blocks.dimensions} dimensions, and the index "
            f"has {document.dimensions}; embed the samples with the model of the database"
        )
    if blocks.num_vectors != len(chunks):
        raise ConfigError(
            f"--embeddings {config.embeddings} holds {blocks.num_vectors:,} vectors, and the "
            f"{config.retro_query_split} samples of these options have {len(chunks):,} chunks; "
            "embed them with the same options"
        )
    manifest = database_manifest(config.retro_db)
    length = None if manifest is None else manifest.config.get("retro_gpt_chunk_length")
    if length not in (None, config.retro_gpt_chunk_length):
        raise ConfigError(
            f"--retro-gpt-chunk-length ({config.retro_gpt_chunk_length}): the chunks of "
            f"{config.retro_db} have {length} tokens; give that"
        )


def check_samples(config: FaissQueryConfig, identity: SamplesIdentity) -> None:
    """Refuse embeddings of other samples, where they say whose they are."""
    url = join(config.embeddings, SAMPLES)
    if not store.exists(url):
        return
    try:
        embedded = SamplesIdentity.from_document(read_checked_json(url))
    except (TypeError, KeyError) as error:
        raise ArtifactError(
            f"{url}: does not describe samples ({error!r}); make the embeddings again"
        ) from error
    if different := embedded.difference(identity):
        raise ConfigError(
            f"--embeddings {config.embeddings}: of other samples than those of these options "
            f"({different}); embed them with the same options"
        )


def say_what_is_dropped(
    config: FaissQueryConfig, chunks: PretrainingChunks, pairs: list[tuple[int, int]]
) -> None:
    """Log how many token files of the samples are in the database; warn if none is.

    pairs: (dataset of the samples, dataset of the database) with the same documents."""
    own = {chunks.prefixes[place] for place, _ in pairs}
    log.info(
        "samples=%d chunks=%d token_files=%d of them in the database=%d",
        *(chunks.num_samples, len(chunks), len(chunks.prefixes), len(own)),
    )
    if not own:
        log.warning(
            "%s was cut from none of the token files of the samples, so no document is a sample's "
            "own; if it has copies of them under other names, give the original files",
            config.retro_db,
        )


def check_memory(
    config: FaissQueryConfig, dimensions: int, document: IndexDocument, database: ChunkDatabase
) -> None:
    """Refuse what does not fit: the index, the documents' ranges, a block with what is found."""
    offsets = 0 if database.doc_offsets is None else len(database.doc_offsets)
    excluded = len(database) if config.retro_exclude_evaluation else 0
    block = config.retro_block_size * (4 * dimensions + 12 * config.retro_query_num_neighbors_save)
    files = [join(config.index, name) for name in shard_names(document.num_shards)]
    needed = sum(store.info(url).size_bytes for url in files) + 24 * offsets + excluded + block
    whole = memory_bytes()
    log.info("memory_gb=%.2f of %.2f", needed / 1e9, whole / 1e9)
    if needed > whole:
        raise ConfigError(
            f"--index {config.index}: the search takes {needed / 1e9:,.1f} GB, and this machine "
            f"has {whole / 1e9:,.1f} GB; build an index of shorter codes, lower "
            "--retro-block-size, or take a larger machine"
        )
