"""Search block by block, drop what is not allowed, test the whole table, publish."""

from __future__ import annotations

import logging
from typing import Any

from stages.faiss_query.checks import (
    check_memory,
    check_samples,
    check_together,
    say_what_is_dropped,
)
from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_query.exclusion import database_with_tokens, excluded_chunks
from stages.faiss_query.search import BlockSearch, Counts, Rules, Search
from stages.faiss_query.table import (
    block_ranges,
    check_leaks,
    join_shares,
    of_share,
    query,
    write_examples,
)
from stages.faiss_query.validate import validate
from stages.runtime.context import StageRun
from trainyard.artifacts import inputs
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_sources import find_datasets
from trainyard.retrieval.hdf5 import merged_name
from trainyard.retrieval.index_document import IndexDocument, read_index_document
from trainyard.retrieval.neighbors import DOCUMENT, NeighborsDocument
from trainyard.retrieval.pretraining_chunks import SamplesIdentity
from trainyard.retrieval.shards import open_shards
from trainyard.retrieval.vectors import EmbeddingBlocks
from trainyard.training.run_samples import open_chunks

log = logging.getLogger(__name__)


def run(config: FaissQueryConfig, stage: StageRun) -> dict[str, Any]:
    """Write the blocks of the table, and `neighbors.json` about it; or those of a share; or join
    the shares; or compare a sample of blocks."""
    inputs.check_in_folder(config.retro_db, merged_name("train"))
    document = read_index_document(config.index, "--index")
    database = ChunkDatabase(config.retro_db)
    chunks = open_chunks(config.samples, config.retro_query_split, config.retro_gpt_chunk_length)
    blocks = EmbeddingBlocks.find(stage.inputs["embeddings"].files, config.embeddings)
    check_together(config, document, database, chunks, blocks)
    pairs = find_datasets(config.retro_db, chunks.prefixes)
    say_what_is_dropped(config, chunks, pairs)
    identity = chunks.identity()
    check_samples(config, identity)
    with_tokens = database_with_tokens(config, chunks.prefixes, pairs)
    rules = Rules(chunks, database, pairs, excluded_chunks(config, with_tokens))

    ranges = block_ranges(config, len(chunks))
    if config.world_size is not None and config.rank is None:
        total, milliseconds = join_shares(config, stage, len(chunks))
    else:
        check_memory(config, blocks.dimensions, document, database)
        of_block = BlockSearch(
            search=open_search(config, stage, document, database),
            embeddings=blocks,
            rules=rules,
            num_kept=config.retro_query_num_neighbors_save,
        )
        if config.retro_task_validate is not None:
            return validate(config, stage, of_block, ranges)
        ranges = list(of_share(config, ranges))
        total, milliseconds = query(config, stage, of_block, ranges)
    check_leaks(config, stage, rules, ranges)
    found = {"chunks": sum(b - a for a, b in ranges), "milliseconds_per_query": milliseconds}
    if config.rank is not None:
        return {**found, "counts": total._asdict()}

    write_examples(config, stage, rules, with_tokens)
    filled = _describe(config, stage, document, identity, len(chunks), total)
    stage.write_json(DOCUMENT, filled.to_document())
    _say_result(config, filled)
    return {
        **found,
        "samples": chunks.num_samples,
        "mean_neighbors": filled.mean_neighbors,
        "share_fewer": filled.share_fewer,
        "share_none": filled.share_none,
        "share_own": round(total.own / max(total.found, 1), 6),
        "share_evaluation": round(total.evaluation / max(total.found, 1), 6),
        "excluded_chunks": 0 if rules.excluded is None else int(rules.excluded.sum()),
        "nprobe": filled.nprobe,
    }


def open_search(
    config: FaissQueryConfig, stage: StageRun, document: IndexDocument, database: ChunkDatabase
) -> Search:
    """The index with the settings of the search, on GPUs where they are asked for."""
    index = open_shards(config.index, document, stage.scratch)
    found = min(config.retro_query_num_neighbors_query, len(database))
    nprobe = _nprobe(config, document)
    ef_search = config.retro_query_ef_search
    on_gpus = index.on_gpus(found, nprobe, ef_search) if config.retro_query_gpus else None
    return Search(index, nprobe, ef_search, found, on_gpus)


def _nprobe(config: FaissQueryConfig, document: IndexDocument) -> int:
    return config.retro_query_nprobe or document.nprobe


def _describe(
    config: FaissQueryConfig,
    stage: StageRun,
    document: IndexDocument,
    samples: SamplesIdentity,
    num_chunks: int,
    total: Counts,
) -> NeighborsDocument:
    """document: of the index."""
    return NeighborsDocument(
        samples=samples,
        num_chunks=num_chunks,
        num_neighbors=config.retro_query_num_neighbors_save,
        database_digest=stage.inputs["retro_db"].digest,
        index_digest=stage.inputs["index"].digest,
        num_neighbors_query=config.retro_query_num_neighbors_query,
        nprobe=_nprobe(config, document),
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
