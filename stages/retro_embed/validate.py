"""Computes a sample of blocks again, and compares them with those of an output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stages.retro_embed.blocks import Block
from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.context import StageRun
from stages.runtime.validation import check_same_run, sample_blocks
from trainyard.artifacts.output import Output
from trainyard.embedding.config import NumberFormat
from trainyard.errors import DataError
from trainyard.retrieval.vectors import EmbeddingBlocks, Vectors

log = logging.getLogger(__name__)

TOLERANCE: dict[NumberFormat, float] = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}
"""Largest length of a difference, as a share of the vector's. On the same CPU and with the same
libraries it is 0; GPUs, and other CPUs, add up in another order."""


def validate(
    config: RetroEmbedConfig,
    stage: StageRun,
    blocks: Sequence[Block],
    embed: Callable[[Sequence[Block]], Any],
) -> dict[str, Any]:
    """embed: yields each block with its vectors. Raises DataError for the first block that has
    others."""
    assert config.retro_task_validate is not None
    output = Output.directory(config.output_dir)
    manifest = check_same_run(config, stage, output)
    stored = EmbeddingBlocks.find(
        [output.file_url(record.path) for record in manifest.files], config.output_dir
    )
    chosen = sample_blocks(len(blocks), config.retro_task_validate)
    count = len(chosen)
    largest = 0.0
    for block, vectors in embed([blocks[number] for number in chosen]):
        (mine,) = [one for one in stored.blocks if one.start == block.start]
        before = np.concatenate([rows for _, rows in stored.read_block(mine, len(mine))])
        difference, row = _difference(before, vectors, mine.url)
        largest = max(largest, difference)
        if not difference <= TOLERANCE[config.embedding.number_format]:
            raise DataError(
                f"{mine.url}: the vector of chunk {block.start + row} differs from a new one by "
                f"{difference:.2g} of its length, and "
                f"{TOLERANCE[config.embedding.number_format]:g} is allowed; make the embeddings "
                "again (--force)"
            )
    metrics = {
        "blocks": count,
        "chunks": sum(len(blocks[number]) for number in chosen),
        "largest_difference": largest,
    }
    print(
        f"{config.output_dir}: {count} of {len(blocks)} blocks computed again, "
        f"{metrics['chunks']:,} chunks; largest difference {largest:.2g} of a vector's length"
    )
    return metrics


def _difference(before: Vectors, now: Vectors, url: str) -> tuple[float, int]:
    """The largest difference of a row as a share of its length, and that row."""
    if before.shape != now.shape:
        raise DataError(f"{url}: vectors {before.shape}, computed again {now.shape}")
    lengths = np.maximum(np.linalg.norm(before, axis=1), np.finfo(np.float32).tiny)
    shares = np.linalg.norm(before - now, axis=1) / lengths
    row = int(shares.argmax())
    return float(shares[row]), row
