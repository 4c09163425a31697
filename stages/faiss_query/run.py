"""Search block by block, drop what is not allowed, test the whole table, publish."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_query.exclusion import database_with_tokens, excluded_chunks
from stages.faiss_query.search import BlockSearch, Counts, Search
from stages.faiss_query.validate import validate
from stages.runtime.context import StageRun
from stages.runtime.finished_files import finish_file, finished_file, move_file
from trainyard.artifacts import inputs, store
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ConfigError
from trainyard.machine import memory_bytes
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_sources import database_manifest, find_datasets
from trainyard.retrieval.examples import EXAMPLES, chosen_chunks, make_example, to_document
from trainyard.retrieval.hdf5 import merged_name
from trainyard.retrieval.index_document import DOCUMENT as INDEX_DOCUMENT
from trainyard.retrieval.index_document import IndexDocument, shard_names
from trainyard.retrieval.leak_test import check_neighbors
from trainyard.retrieval.mapped import map_array
from trainyard.retrieval.neighbors import (
    DISTANCES,
    DOCUMENT,
    NEIGHBORS,
    NeighborsDocument,
    block_name,
    write_block,
)
from trainyard.retrieval.pretraining_chunks import SAMPLES, PretrainingChunks, SamplesIdentity
from trainyard.retrieval.shards import open_shards
from trainyard.retrieval.vectors import EmbeddingBlocks
from trainyard.training.run_samples import open_chunks

log = logging.getLogger(__name__)

PROBE_ROWS = 256
"""Vectors that are searched for to estimate the time."""


def run(config: FaissQueryConfig, stage: StageRun) -> dict[str, Any]:
    """Write the blocks of the table, and `neighbors.json` about it."""
    inputs.check_in_folder(config.index, INDEX_DOCUMENT)
    inputs.check_in_folder(config.retro_db, merged_name("train"))
    document = IndexDocument.from_document(
        store.read_json(join(config.index, INDEX_DOCUMENT)), join(config.index, INDEX_DOCUMENT)
    )
    database = ChunkDatabase(config.retro_db)
    chunks = open_chunks(config.samples, config.retro_query_split, config.retro_gpt_chunk_length)
    blocks = EmbeddingBlocks.find(stage.inputs["embeddings"].files, config.embeddings)
    _check_together(config, document, database, chunks, blocks)
    pairs = find_datasets(config.retro_db, chunks.prefixes)
    _say_what_is_dropped(config, chunks, pairs)
    _check_memory(config, blocks.dimensions, document, database)
    identity = chunks.identity()
    _check_samples(config, identity)
    with_tokens = database_with_tokens(config, chunks.prefixes, pairs)
    excluded = excluded_chunks(config, with_tokens)

    index = open_shards(config.index, document, stage.scratch)
    nprobe = config.retro_query_nprobe or document.nprobe
    found = min(config.retro_query_num_neighbors_query, len(database))
    of_block = BlockSearch(
        search=Search(index, nprobe, config.retro_query_ef_search, found),
        embeddings=blocks,
        chunks=chunks,
        database=database,
        pairs=pairs,
        excluded=excluded,
        num_kept=config.retro_query_num_neighbors_save,
    )
    if config.retro_task_validate is not None:
        return validate(config, stage, of_block, _ranges(config, len(chunks)))
    total, milliseconds = _query(config, stage, of_block)
    _test_leaks(config, stage, of_block)
    _write_examples(config, stage, of_block, with_tokens)

    filled = _document(config, stage, identity, total, nprobe, num_chunks=len(chunks))
    stage.write_json(DOCUMENT, filled.to_document())
    _say_result(config, filled)
    return {
        "chunks": len(chunks),
        "samples": chunks.num_samples,
        "mean_neighbors": filled.mean_neighbors,
        "share_fewer": filled.share_fewer,
        "share_none": filled.share_none,
        "share_own": round(total.own / max(total.found, 1), 6),
        "share_evaluation": round(total.evaluation / max(total.found, 1), 6),
        "excluded_chunks": 0 if excluded is None else int(excluded.sum()),
        "nprobe": nprobe,
        "milliseconds_per_query": milliseconds,
    }


def _document(
    config: FaissQueryConfig,
    stage: StageRun,
    identity: SamplesIdentity,
    total: Counts,
    nprobe: int,
    *,
    num_chunks: int,
) -> NeighborsDocument:
    """What the table of neighbours says of itself."""
    return NeighborsDocument(
        samples=identity,
        num_chunks=num_chunks,
        num_neighbors=config.retro_query_num_neighbors_save,
        database_digest=stage.inputs["retro_db"].digest,
        index_digest=stage.inputs["index"].digest,
        num_neighbors_query=config.retro_query_num_neighbors_query,
        nprobe=nprobe,
        ef_search=config.retro_query_ef_search,
        mean_neighbors=round(total.kept / num_chunks, 6),
        share_fewer=round(total.fewer / num_chunks, 6),
        share_none=round(total.none / num_chunks, 6),
        evaluation_sets=tuple(
            stage.inputs[f"evaluation_{i}"].digest
            for i in range(len(config.retro_exclude_evaluation))
        ),
        evaluation_run=config.retro_exclude_run if config.retro_exclude_evaluation else 0,
    )


# --- before the first vector --------------------------------------------------------------------


def _check_together(
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


def _check_samples(config: FaissQueryConfig, identity: SamplesIdentity) -> None:
    """Refuse embeddings of other samples, where they say whose they are."""
    url = join(config.embeddings, SAMPLES)
    if not store.exists(url):
        return
    try:
        embedded = SamplesIdentity.from_document(store.read_json(url))
    except (TypeError, KeyError) as error:
        raise ArtifactError(
            f"{url}: does not describe samples ({error!r}); make the embeddings again"
        ) from error
    if different := embedded.difference(identity):
        raise ConfigError(
            f"--embeddings {config.embeddings}: of other samples than those of these options "
            f"({different}); embed them with the same options"
        )


def _say_what_is_dropped(
    config: FaissQueryConfig, chunks: PretrainingChunks, pairs: list[tuple[int, int]]
) -> None:
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


def _check_memory(
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


# --- the table ----------------------------------------------------------------------------------


def _ranges(config: FaissQueryConfig, num_chunks: int) -> list[tuple[int, int]]:
    size = config.retro_block_size
    return [(start, min(start + size, num_chunks)) for start in range(0, num_chunks, size)]


def _query(
    config: FaissQueryConfig, stage: StageRun, of_block: BlockSearch
) -> tuple[Counts, float]:
    """Write all blocks that no killed run has finished; milliseconds of a search."""
    num_chunks, total, missing = len(of_block.chunks), Counts(), []
    for start, stop in _ranges(config, num_chunks):
        finished = finished_file(stage, _key(start))
        if finished is None:
            missing.append((start, stop))
        else:
            total += Counts(**finished)
    num_missing = sum(stop - start for start, stop in missing)
    if num_missing < num_chunks:
        log.info("resuming: chunks_done=%d chunks=%d", num_chunks - num_missing, num_chunks)
    probe = of_block.embeddings.rows(np.arange(min(PROBE_ROWS, num_chunks)))
    milliseconds = of_block.search.milliseconds(probe)
    log.info(
        "searching nprobe=%d milliseconds_per_query=%.3f estimated_minutes=%.1f output_gb=%.2f",
        *(of_block.search.nprobe, milliseconds, num_missing * milliseconds / 60e3),
        num_chunks * 12 * config.retro_query_num_neighbors_save / 1e9,
    )
    seconds = 0.0
    with stage.progress(num_missing, "chunks", "query") as progress:
        for start, stop in missing:
            began = time.monotonic()
            ids, distances, counts = of_block.neighbors(start, stop, progress.update)
            seconds += time.monotonic() - began
            path = stage.scratch / "block.hdf5"
            write_block(path, ids, distances)
            record = move_file(stage, path, block_name(start, stop, num_chunks))
            finish_file(stage, _key(start), record, counts._asdict())
            total += counts
    return total, round(1000 * seconds / num_missing if missing else milliseconds, 4)


def _key(start: int) -> str:
    return f"block-{start:015d}"


def _test_leaks(config: FaissQueryConfig, stage: StageRun, of_block: BlockSearch) -> None:
    """Read every block of the table again, as it was written, and test it."""
    num_chunks = len(of_block.chunks)
    for start, stop in _ranges(config, num_chunks):
        check_neighbors(
            _written(config, stage, start, stop, num_chunks, NEIGHBORS, "int64"),
            *(start, of_block.chunks, of_block.database, of_block.pairs, of_block.excluded),
        )
    log.info("leak test passed chunks=%d", num_chunks)


def _write_examples(
    config: FaissQueryConfig,
    stage: StageRun,
    of_block: BlockSearch,
    database: ChunkDatabase | None,
) -> None:
    """A few chunks with their neighbours, for the run card."""
    if database is None:
        log.info(
            "no %s for the run card: the samples do not have all token files of the database; "
            "name them with --retro-db-data-path",
            EXAMPLES,
        )
        return
    chunks, found = of_block.chunks, []
    for number in chosen_chunks(len(chunks)):
        start = number - number % config.retro_block_size
        block = (start, min(start + config.retro_block_size, len(chunks)), len(chunks))
        ids = _written(config, stage, *block, NEIGHBORS, "int64")
        distances = _written(config, stage, *block, DISTANCES, "float32")
        row = number - start
        found.append(make_example(number, chunks, database, ids[row], distances[row]))
    stage.write_json(EXAMPLES, to_document(found))


def _written(
    config: FaissQueryConfig,
    stage: StageRun,
    start: int,
    stop: int,
    num_chunks: int,
    name: str,
    dtype: str,
) -> NDArray[Any]:
    """An array of a finished block, as it was written."""
    assert stage.output is not None
    url = stage.output.file_url(block_name(start, stop, num_chunks))
    k = config.retro_query_num_neighbors_save
    return map_array(url, name, dtype, k, "a block of neighbours")


def _say_result(config: FaissQueryConfig, table: NeighborsDocument) -> None:
    log.info(
        "mean_neighbors=%.2f share_fewer=%.4f share_none=%.4f",
        *(table.mean_neighbors, table.share_fewer, table.share_none),
    )
    if table.share_fewer > 0.01:
        log.warning(
            "%.1f %% of the chunks have fewer than %d neighbours; the rest is -1, which training "
            "masks; for more, raise --retro-query-num-neighbors-query (%d) or "
            "--retro-query-nprobe (%d)",
            *(100 * table.share_fewer, table.num_neighbors),
            *(table.num_neighbors_query, table.nprobe),
        )
