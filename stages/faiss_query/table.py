"""The blocks of the table: searched for or copied from shares, tested, and a few of them shown."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_query.search import BlockSearch, Counts, Rules
from stages.runtime.context import StageRun
from stages.runtime.disk_space import check_disk
from stages.runtime.finished_files import copy_file, finish_file, finished_file, move_file
from stages.runtime.joined_shares import share_manifests
from trainyard.errors import ArtifactError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.examples import EXAMPLES, chosen_chunks, make_example, to_document
from trainyard.retrieval.leak_test import check_neighbors
from trainyard.retrieval.mapped import map_array
from trainyard.retrieval.neighbors import DISTANCES, NEIGHBORS, block_name, write_block

log = logging.getLogger(__name__)

PROBE_ROWS = 256
"""Vectors that are searched for to estimate the time."""

Ranges = Sequence[tuple[int, int]]
"""Chunks of each block, from one up to another."""


def block_ranges(config: FaissQueryConfig, num_chunks: int) -> list[tuple[int, int]]:
    """Of all blocks."""
    size = config.retro_block_size
    return [(start, min(start + size, num_chunks)) for start in range(0, num_chunks, size)]


def of_share(config: FaissQueryConfig, ranges: Ranges) -> Ranges:
    """The blocks of this share: they go round to the shares, so that all take as long."""
    return ranges if config.rank is None else ranges[config.rank :: config.world_size]


def query(
    config: FaissQueryConfig, stage: StageRun, of_block: BlockSearch, ranges: Ranges
) -> tuple[Counts, float]:
    """Write the blocks that no killed run wrote; what was found, milliseconds of a search."""
    num_chunks, total, missing = len(of_block.rules.chunks), Counts(), []
    for start, stop in ranges:
        finished = finished_file(stage, _key(start))
        if finished is None:
            missing.append((start, stop))
        else:
            total += Counts(**finished)
    num_missing, num_mine = (sum(b - a for a, b in some) for some in (missing, ranges))
    if num_missing < num_mine:
        log.info("resuming: chunks_done=%d chunks=%d", num_mine - num_missing, num_mine)
    milliseconds = _estimate(config, stage, of_block, num_missing)
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


def _estimate(
    config: FaissQueryConfig, stage: StageRun, of_block: BlockSearch, num_missing: int
) -> float:
    """Milliseconds of a search. Raises ConfigError if the disk has no room for the table."""
    probe = of_block.embeddings.rows(np.arange(min(PROBE_ROWS, len(of_block.rules.chunks))))
    milliseconds = of_block.search.milliseconds(probe)
    size_bytes = num_missing * 12 * config.retro_query_num_neighbors_save
    log.info(
        "searching nprobe=%d milliseconds_per_query=%.3f estimated_minutes=%.1f",
        *(of_block.search.nprobe, milliseconds, num_missing * milliseconds / 60e3),
    )
    check_disk(
        stage,
        size_bytes,
        f"{config.retro_query_num_neighbors_save} neighbours of {num_missing:,} chunks",
        "free some, lower --retro-query-num-neighbors-save, or write to another disk or an object "
        "store",
    )
    return milliseconds


def _key(start: int) -> str:
    return f"block-{start:015d}"


def join_shares(config: FaissQueryConfig, stage: StageRun, num_chunks: int) -> tuple[Counts, float]:
    """Copy the blocks of all shares; the sum of what they found, milliseconds of a search."""
    shares = config.all_shares()
    manifests = share_manifests(stage, shares, "faiss_query")
    size = sum(record.size_bytes for manifest in manifests for record in manifest.files)
    ranges = block_ranges(config, num_chunks)
    with stage.progress(size, "bytes", "join") as progress:
        for number, (start, stop) in enumerate(ranges):
            rank, name = number % len(shares), block_name(start, stop, num_chunks)
            record = manifests[rank].record(name)
            if record is None:
                raise ArtifactError(f"{shares[rank].manifest_url}: does not list {name}")
            copy_file(stage, shares[rank].file_url(name), name, record, progress.update)
    total, milliseconds = Counts(), 0.0
    for manifest in manifests:
        metrics = manifest.metrics
        total += Counts(**metrics["counts"])
        milliseconds += metrics["chunks"] * metrics["milliseconds_per_query"]
    return total, round(milliseconds / num_chunks, 4)


def check_leaks(config: FaissQueryConfig, stage: StageRun, rules: Rules, ranges: Ranges) -> None:
    """Read these blocks of the table again, as they were written, and test them."""
    num_chunks = len(rules.chunks)
    for start, stop in ranges:
        check_neighbors(
            _written(config, stage, start, stop, num_chunks, NEIGHBORS, "int64"),
            *(start, rules.chunks, rules.database, rules.pairs, rules.excluded),
        )
    log.info("leak test passed chunks=%d", sum(stop - start for start, stop in ranges))


def write_examples(
    config: FaissQueryConfig,
    stage: StageRun,
    rules: Rules,
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
    chunks, found = rules.chunks, []
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
