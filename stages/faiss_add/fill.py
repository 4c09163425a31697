"""Adds blocks to an index, and keeps the codes of finished ones for a run after a kill."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.runtime.context import StageRun
from stages.runtime.disk_space import check_disk
from trainyard.artifacts import store
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval import index_memory
from trainyard.retrieval.vectors import EmbeddingBlocks, VectorBlock

log = logging.getLogger(__name__)

PROBE_ROWS = 256
"""Vectors that are encoded to estimate the time."""

ENCODED_BYTES = 16 << 20
"""Vectors that are encoded at once."""


def rows_at_once(blocks: EmbeddingBlocks) -> int:
    """Vectors that are encoded at once."""
    return max(ENCODED_BYTES // (4 * blocks.dimensions), 1)


def fill(
    index: Any, blocks: EmbeddingBlocks, wanted: Sequence[VectorBlock], stage: StageRun
) -> None:
    """Add the vectors of these blocks under their ids. A rerun encodes only missing blocks.

    Raises ConfigError if the disk has no room for the codes and the index."""
    _check_disk(index, wanted, stage)
    with stage.progress(sum(map(len, wanted)), "vectors", "add") as progress:
        if not faiss_index.facts(index).has_codes:
            for block in wanted:
                for _, vectors in blocks.read_block(block, rows_at_once(blocks)):
                    faiss_index.add_vectors(index, vectors)
                progress.update(len(block))
            return
        counts, done = [], stage.work.names()
        _log_expected_time(index, blocks, [b for b in wanted if _name(b) not in done])
        for block in wanted:
            counts.append(_encode(index, blocks, block, stage, _name(block) in done))
            progress.update(len(block))
    if counts:  # first all codes, so that each list takes its memory once
        index_memory.reserve(index, np.sum(counts, axis=0))
    for block in wanted:
        for start, codes in _kept_codes(stage, block, rows_at_once(blocks)):
            faiss_index.add_codes(index, codes, start)


def _log_expected_time(index: Any, blocks: EmbeddingBlocks, missing: Sequence[VectorBlock]) -> None:
    """Estimate the encoding, which is most of the work, from a few vectors."""
    if not missing:
        return
    with contextlib.closing(blocks.read_block(missing[0], PROBE_ROWS)) as pieces:
        _, few = next(pieces)
    began = time.monotonic()
    faiss_index.encode(index, few)
    each = (time.monotonic() - began) / len(few)
    count = sum(map(len, missing))
    log.info("adding vectors=%d estimated_minutes=%.1f", count, count * each / 60)


def _check_disk(index: Any, wanted: Sequence[VectorBlock], stage: StageRun) -> None:
    """Codes are kept for a rerun, and the index is written beside them."""
    facts, done = faiss_index.facts(index), stage.work.names()
    added = sum(map(len, wanted))
    kept = sum(len(block) for block in wanted if _name(block) not in done)
    codes = kept * facts.code_bytes if facts.has_codes else 0
    total = index.ntotal + added
    each = facts.code_bytes if facts.has_codes else 4 * index.d
    check_disk(
        stage,
        codes + total * (each + 8),
        f"an index of {total:,} vectors and the codes kept for a rerun",
        "free some, take shorter codes such as PQ64, or write to another disk or an object store",
    )


def _encode(
    index: Any, blocks: EmbeddingBlocks, block: VectorBlock, stage: StageRun, is_done: bool
) -> NDArray[np.int64]:
    """Keep the codes of a block, unless a killed run has; how many are of each list."""
    rows = rows_at_once(blocks)
    if is_done:
        pieces = _kept_codes(stage, block, rows)
        return _sum(index_memory.list_counts(index, codes) for _, codes in pieces)
    counts = []
    with stage.work.open(_name(block)) as file:
        for _, vectors in blocks.read_block(block, rows):
            codes = faiss_index.encode(index, vectors)
            file.write(codes)
            counts.append(index_memory.list_counts(index, codes))
    return _sum(counts)


def _sum(counts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    total: NDArray[np.int64] = np.sum(list(counts), axis=0)
    return total


def _kept_codes(
    stage: StageRun, block: VectorBlock, rows: int
) -> Iterator[tuple[int, faiss_index.Codes]]:
    """The first id and the codes of each piece of a block."""
    url = stage.work.url(_name(block))
    width = store.info(url).size_bytes // len(block)
    with store.open_input(url) as file:
        for start in range(block.start, block.end, rows):
            count = min(rows, block.end - start)
            codes = np.frombuffer(file.read(count * width), np.uint8)
            yield start, codes.reshape(count, width)


def _name(block: VectorBlock) -> str:
    return f"codes/{block.start}-{block.end}"
