"""Adds blocks to an index, and keeps the codes of finished ones for a run after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.vectors import EmbeddingBlocks, VectorBlock

ENCODED_BYTES = 16 << 20
"""Vectors that are encoded at once."""


def rows_at_once(blocks: EmbeddingBlocks) -> int:
    """Vectors that are encoded at once."""
    return max(ENCODED_BYTES // (4 * blocks.dimensions), 1)


def fill(
    index: Any, blocks: EmbeddingBlocks, wanted: Sequence[VectorBlock], stage: StageRun
) -> None:
    """Add the vectors of these blocks under their ids. A rerun encodes only missing blocks."""
    has_codes = faiss_index.facts(index).has_codes
    rows = rows_at_once(blocks)
    done = stage.work.names()
    with stage.progress(sum(map(len, wanted)), "vectors", "add") as progress:
        for block in wanted:
            name = f"codes/{block.start}-{block.end}"
            if not has_codes:
                for _, vectors in blocks.read_block(block, rows):
                    faiss_index.add_vectors(index, vectors)
            elif name in done:
                codes = _read_codes(stage, name, len(block))
                faiss_index.add_codes(index, codes, block.start)
            else:
                _encode_block(index, blocks, block, rows, stage, name)
            progress.update(len(block))


def _encode_block(
    index: Any, blocks: EmbeddingBlocks, block: VectorBlock, rows: int, stage: StageRun, name: str
) -> None:
    with stage.work.open(name) as file:
        for start, vectors in blocks.read_block(block, rows):
            codes = faiss_index.encode(index, vectors)
            file.write(codes)
            faiss_index.add_codes(index, codes, start)


def _read_codes(stage: StageRun, name: str, count: int) -> faiss_index.Codes:
    codes = np.frombuffer(store.read_bytes(stage.work.url(name)), np.uint8)
    return codes.reshape(count, -1)
