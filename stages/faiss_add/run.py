"""Encode block by block, add the codes in order, measure recall, publish."""

from __future__ import annotations

import io
import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.faiss_add.config import FaissAddConfig
from stages.runtime.context import StageRun
from trainyard.artifacts import inputs, store
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError, DataError
from trainyard.machine import memory_bytes
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import (
    ADDED,
    DOCUMENT,
    EMPTY,
    IndexDocument,
    Recall,
    SearchRecall,
)
from trainyard.retrieval.recall import ROWS, drop_self, measure_recall, sample_ids
from trainyard.retrieval.vectors import EmbeddingBlocks, VectorBlock

log = logging.getLogger(__name__)

ENCODED_BYTES = 64 << 20
"""Vectors that are encoded at once."""

NPROBES = tuple(4**power for power in range(12))
"""Numbers of lists for which recall is measured, up to all of them."""


def run(config: FaissAddConfig, stage: StageRun) -> dict[str, Any]:
    """Write `added.faissindex`, and `index.json` with its recall."""
    for name in (DOCUMENT, EMPTY):
        inputs.check_listed(join(config.index, name), inputs.Manifests())
    document = IndexDocument.from_document(
        store.read_json(join(config.index, DOCUMENT)), join(config.index, DOCUMENT)
    )
    blocks = EmbeddingBlocks.find(stage.inputs["embeddings"].files, config.embeddings)
    blocks = _first_share(blocks, config.retro_index_add_load_fraction)
    if blocks.dimensions != document.dimensions:
        raise ConfigError(
            f"--embeddings {config.embeddings}: of {blocks.dimensions} dimensions, and the index "
            f"was trained on {document.dimensions}; train one on embeddings of the same model"
        )
    _check_memory(document, blocks.num_vectors)
    index = faiss_index.read(inputs.fetch(join(config.index, EMPTY), stage.scratch))
    faiss_index.check_described(index, document, join(config.index, EMPTY))
    began = time.monotonic()
    fill(index, blocks, stage)
    seconds = time.monotonic() - began

    recall, costs = _recall(config, index, blocks)
    chosen = recall.cheapest(config.target_recall)
    if config.retro_query_nprobe is not None:
        chosen = next(s for s in recall.curve if s.nprobe == _nprobe_given(config, document))
    log.info(
        "recall@%d=%.3f nprobe=%d sample=%d", recall.neighbors, chosen.recall, chosen.nprobe,
        recall.sample,
    )  # fmt: skip
    if chosen.recall < config.retro_min_recall:
        raise DataError(_recall_message(config, document, recall, chosen))
    with stage.open(ADDED) as file, io.BufferedWriter(file) as buffered:
        faiss_index.write(index, buffered)
    filled = replace(document, num_vectors=blocks.num_vectors, nprobe=chosen.nprobe, recall=recall)
    stage.write_json(DOCUMENT, filled.to_document())
    sizes = faiss_index.list_sizes(index)
    return {
        "vectors": blocks.num_vectors,
        "add_seconds": seconds,
        "recall": chosen.recall,
        "nprobe": chosen.nprobe,
        **costs,
        **({} if sizes is None else _balance(sizes)),
    }


def _first_share(blocks: EmbeddingBlocks, fraction: float) -> EmbeddingBlocks:
    count = math.ceil(blocks.num_vectors * fraction)
    return EmbeddingBlocks([block for block in blocks.blocks if block.start < count])


def _check_memory(document: IndexDocument, num_vectors: int) -> None:
    needed, whole = num_vectors * (document.code_bytes + 8), memory_bytes()
    log.info("vectors=%d index_gb=%.2f", num_vectors, needed / 1e9)
    if needed > whole:
        raise ConfigError(
            f"{document.index_str}: {num_vectors:,} vectors take {needed / 1e9:,.1f} GB, and this "
            f"machine has {whole / 1e9:,.1f} GB; train an index of shorter codes, such as PQ64, or "
            "take a larger machine"
        )


def fill(index: Any, blocks: EmbeddingBlocks, stage: StageRun) -> None:
    """Add all vectors. Codes of a block are kept, so a rerun encodes only missing blocks."""
    has_codes = faiss_index.facts(index).has_codes
    rows = max(ENCODED_BYTES // (4 * blocks.dimensions), 1)
    done = stage.work.names()
    with stage.progress(blocks.num_vectors, "vectors", "add") as progress:
        for block in blocks.blocks:
            name = f"codes/{block.start}-{block.end}"
            if not has_codes:
                for _, vectors in blocks.read_block(block, rows):
                    faiss_index.add_vectors(index, vectors)
            elif name in done:
                faiss_index.add_codes(index, _read_codes(stage, name, len(block)))
            else:
                _encode_block(index, blocks, block, rows, stage, name)
            progress.update(len(block))


def _encode_block(
    index: Any, blocks: EmbeddingBlocks, block: VectorBlock, rows: int, stage: StageRun, name: str
) -> None:
    with stage.work.open(name) as file:
        for _, vectors in blocks.read_block(block, rows):
            codes = faiss_index.encode(index, vectors)
            file.write(codes)
            faiss_index.add_codes(index, codes)


def _read_codes(stage: StageRun, name: str, count: int) -> faiss_index.Codes:
    codes = np.frombuffer(store.read_bytes(stage.work.url(name)), np.uint8)
    return codes.reshape(count, -1)


def _recall(
    config: FaissAddConfig, index: Any, blocks: EmbeddingBlocks
) -> tuple[Recall, dict[str, dict[str, float]]]:
    """Recall for several numbers of lists; for each, milliseconds of a query, and bytes of vectors
    that it compares with."""
    ids = sample_ids(blocks.num_vectors, config.recall_sample, config.seed)
    queries = blocks.rows(ids)
    k = min(config.retro_query_num_neighbors_save, max(blocks.num_vectors - 1, 1))
    num_lists = faiss_index.facts(index).num_lists
    nprobes = sorted(
        {min(n, max(num_lists, 1)) for n in (*NPROBES, config.retro_query_nprobe or 1)}
    )
    found: list[NDArray[np.int64]] = []
    milliseconds: dict[str, float] = {}
    read: dict[str, float] = {}
    for nprobe in nprobes:
        search = partial(
            faiss_index.search, index, queries, k + 1, nprobe, config.retro_query_ef_search
        )
        began = time.monotonic()
        (_, neighbors), compared = faiss_index.count_compared(index, search)
        milliseconds[str(nprobe)] = round(1000 * (time.monotonic() - began) / len(ids), 4)
        read[str(nprobe)] = round(compared * faiss_index.vector_bytes(index) / len(ids))
        found.append(drop_self(neighbors, ids))
    shares = measure_recall(queries, ids, np.stack(found), blocks.read(ROWS))
    curve = tuple(
        SearchRecall(nprobe=nprobe, recall=round(share, 6))
        for nprobe, share in zip(nprobes, shares, strict=True)
    )
    recall = Recall(neighbors=k, sample=len(ids), seed=config.seed, curve=curve)
    return recall, {"milliseconds_per_query": milliseconds, "bytes_per_query": read}


def _nprobe_given(config: FaissAddConfig, document: IndexDocument) -> int:
    return min(config.retro_query_nprobe or 1, max(document.num_lists, 1))


def _recall_message(
    config: FaissAddConfig, document: IndexDocument, recall: Recall, chosen: SearchRecall
) -> str:
    best = max(recall.curve, key=lambda search: search.recall)
    return (
        f"recall@{recall.neighbors} of {document.index_str} is {chosen.recall:.3f} with "
        f"{chosen.nprobe} lists searched, below --retro-min-recall {config.retro_min_recall}; its "
        f"best is {best.recall:.3f} with {best.nprobe}; train an index of longer codes, such as "
        "SQ8, or search more lists (--retro-query-nprobe)"
    )


def _balance(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float]:
    """How evenly vectors lie in lists: 1.0 is even; 2.0 makes an average search twice as long."""
    total = max(int(sizes.sum()), 1)
    return {
        "list_imbalance": round(float((sizes.astype(float) ** 2).sum()) * len(sizes) / total**2, 4),
        "empty_lists": int((sizes == 0).sum()),
    }
