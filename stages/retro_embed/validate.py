"""Computes a sample of blocks again, and compares them with those of an output."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stages.retro_embed.blocks import Block
from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.context import StageRun
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import Output
from trainyard.config import digest_relevant, flag
from trainyard.embedding.config import NumberFormat
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.retrieval.vectors import EmbeddingBlocks, Vectors

log = logging.getLogger(__name__)

SEED = 1234

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
    manifest = _manifest(config, stage, output)
    stored = EmbeddingBlocks.find(
        [output.file_url(record.path) for record in manifest.files], config.output_dir
    )
    count = math.ceil(len(blocks) * config.retro_task_validate)
    chosen = np.random.default_rng(SEED).choice(len(blocks), count, replace=False)
    places = {blocks[number].start: number for number in sorted(chosen.tolist())}
    largest = 0.0
    for block, vectors in embed([blocks[number] for number in places.values()]):
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
        "chunks": sum(len(blocks[number]) for number in places.values()),
        "largest_difference": largest,
    }
    print(
        f"{config.output_dir}: {count} of {len(blocks)} blocks computed again, "
        f"{metrics['chunks']:,} chunks; largest difference {largest:.2g} of a vector's length"
    )
    return metrics


def _manifest(config: RetroEmbedConfig, stage: StageRun, output: Output) -> Manifest:
    """The manifest of the output; ConfigError if it is of other options or inputs."""
    found = read_manifest(output.manifest_url)
    if found is None:
        raise ArtifactError(
            f"--output-dir {config.output_dir}: no manifest.json, so there are no finished "
            "embeddings to validate; run without --retro-task-validate first"
        )
    manifest, mine = found[0], digest_relevant(config)
    keys = sorted(mine.keys() | manifest.config.keys())
    for key in keys:
        before = manifest.config.get(key)
        if before != mine.get(key):
            raise ConfigError(
                f"{flag(key)} {mine.get(key)!r}: {config.output_dir} was made with {before!r}; "
                "give the options that it was made with"
            )
    for name, given in stage.inputs.items():
        record = manifest.inputs.get(name)
        if record is None or record.digest != given.digest:
            raise ConfigError(
                f"input {name} ({', '.join(given.urls)}) is not the one that {config.output_dir} "
                "was made from; give that, or make the embeddings again"
            )
    return manifest


def _difference(before: Vectors, now: Vectors, url: str) -> tuple[float, int]:
    """The largest difference of a row as a share of its length, and that row."""
    if before.shape != now.shape:
        raise DataError(f"{url}: vectors {before.shape}, computed again {now.shape}")
    lengths = np.maximum(np.linalg.norm(before, axis=1), np.finfo(np.float32).tiny)
    shares = np.linalg.norm(before - now, axis=1) / lengths
    row = int(shares.argmax())
    return float(shares[row]), row
