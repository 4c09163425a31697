"""Choose the index, say what it will cost, train it on a sample."""

from __future__ import annotations

import io
import logging
import math
import time
from typing import Any

import numpy as np

from stages.faiss_train.config import FaissTrainConfig
from stages.runtime.context import StageRun
from trainyard.errors import ConfigError
from trainyard.machine import memory_bytes
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_choice import AUTO, POINTS_PER_LIST, Choice, choose_index
from trainyard.retrieval.index_document import DOCUMENT, EMPTY, IndexDocument
from trainyard.retrieval.vectors import EmbeddingBlocks

log = logging.getLogger(__name__)

CLUSTERING_ROUNDS = 10
"""Rounds of k-means over the lists of an inverted file, faiss's default."""

PROBE_ROWS = 2048
"""Vectors that are assigned to as many centroids to measure how fast this machine is."""


def run(config: FaissTrainConfig, stage: StageRun) -> dict[str, Any]:
    """Write `empty.faissindex`, and `index.json` about it."""
    blocks = EmbeddingBlocks.find(stage.inputs["embeddings"].files, config.embeddings)
    available = math.ceil(blocks.num_vectors * config.retro_index_train_load_fraction)
    size = config.index_size or blocks.num_vectors
    choice = _choice(config, size, blocks.dimensions, available)
    index = faiss_index.create(blocks.dimensions, choice.index_str)
    facts = faiss_index.facts(index)
    num_training = _num_training(config, facts, choice, available)
    _check_memory(num_training, blocks.dimensions, facts.code_bytes, size)

    seconds = 0.0
    if num_training:
        drawn = np.random.default_rng(config.seed).choice(available, num_training, replace=False)
        vectors = blocks.rows(np.sort(drawn))
        _log_expected_time(vectors, facts.num_lists)
        began = time.monotonic()
        faiss_index.train(index, vectors)
        seconds = time.monotonic() - began
    with stage.open(EMPTY) as file, io.BufferedWriter(file) as buffered:
        faiss_index.write(index, buffered)
    document = IndexDocument(
        index_str=choice.index_str,
        reason=choice.reason,
        dimensions=blocks.dimensions,
        num_lists=facts.num_lists,
        code_bytes=facts.code_bytes,
        num_training=num_training,
    )
    stage.write_json(DOCUMENT, document.to_document())
    log.info("trained index=%s vectors=%d seconds=%.1f", choice.index_str, num_training, seconds)
    return {"training_vectors": num_training, "lists": facts.num_lists, "train_seconds": seconds}


def _choice(config: FaissTrainConfig, size: int, dimensions: int, available: int) -> Choice:
    if config.retro_index_str != AUTO:
        return Choice(config.retro_index_str, "given by --retro-index-str")
    choice = choose_index(size, dimensions, config.retro_index_ntrain or available)
    log.info("index %s: %s", choice.index_str, choice.reason)
    return choice


def _num_training(
    config: FaissTrainConfig, facts: faiss_index.IndexFacts, choice: Choice, available: int
) -> int:
    """Vectors to train on; 0 for an index that needs none.

    Raises ConfigError for too few, before any is read."""
    if not facts.needs_training:
        return 0
    wanted = config.retro_index_ntrain or facts.most_training or available
    if config.retro_index_ntrain is not None and wanted > available:
        raise ConfigError(
            f"--retro-index-ntrain {wanted:,}: there are {available:,} embeddings to draw from; "
            "give fewer, or embed more chunks"
        )
    count = min(wanted, available)
    if count < facts.least_training:
        lists = max(available // POINTS_PER_LIST, 1)
        raise ConfigError(
            f"{choice.index_str} needs {facts.least_training:,} training vectors "
            f"({POINTS_PER_LIST} for each of its {facts.num_lists:,} lists), and there "
            f"are {count:,}; give an index of at most {lists:,} lists, or leave "
            "--retro-index-str out for one that fits"
        )
    return count


def _check_memory(num_training: int, dimensions: int, code_bytes: int, size: int) -> None:
    # k-means of a quantizer may work on a copy of the vectors.
    needed = 2 * num_training * dimensions * 4
    filled = size * (code_bytes + 8)
    log.info(
        "training_vectors=%d training_gb=%.2f index_gb=%.2f",
        num_training,
        needed / 1e9,
        filled / 1e9,
    )
    whole = memory_bytes()
    if needed > whole:
        raise ConfigError(
            f"training on {num_training:,} vectors of {dimensions} dimensions takes "
            f"{needed / 1e9:,.1f} GB of memory, and {whole / 1e9:,.1f} GB are here; lower "
            "--retro-index-ntrain or the number of lists, or take a larger machine"
        )


def _log_expected_time(vectors: np.ndarray[Any, np.dtype[np.float32]], num_lists: int) -> None:
    """Estimate the clustering from a product of small matrices, which is most of its work."""
    if not num_lists:
        return
    few = vectors[:PROBE_ROWS]
    began = time.monotonic()
    few @ few.T
    rate = len(few) ** 2 / max(time.monotonic() - began, 1e-6)
    seconds = CLUSTERING_ROUNDS * len(vectors) * num_lists / rate
    log.info("clustering into %d lists takes about %.0f s", num_lists, seconds)
