"""What a filled index finds, how its lists are filled, and how both changed by what was added."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.faiss_add.config import FaissAddConfig
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import IndexDocument, Recall, SearchRecall
from trainyard.retrieval.recall import ROWS, drop_self, measure_recall, sample_ids
from trainyard.retrieval.shards import Shards
from trainyard.retrieval.vectors import EmbeddingBlocks

log = logging.getLogger(__name__)

NPROBES = tuple(4**power for power in range(12))
"""Numbers of lists for which recall is measured, up to all of them."""

LOST_RECALL = 0.02
MORE_IMBALANCE = 1.25
"""From these on, what was added is unlike what the index was trained on."""


def nprobes_of(config: FaissAddConfig, document: IndexDocument) -> list[int]:
    """Numbers of lists for which recall is measured, in increasing order."""
    most = max(document.num_lists, 1)
    wanted = (*NPROBES, config.retro_query_nprobe or 1, document.nprobe)
    return sorted({min(nprobe, most) for nprobe in wanted})


def recall_of(
    config: FaissAddConfig, document: IndexDocument, shards: Shards, blocks: EmbeddingBlocks
) -> tuple[Recall, dict[str, dict[str, float]]]:
    """Recall for several numbers of lists; for each, milliseconds of a query, and bytes of vectors
    that it is compared with."""
    ids = sample_ids(blocks.num_vectors, config.recall_sample, config.seed)
    queries = blocks.rows(ids)
    k = min(config.retro_query_num_neighbors_save, max(blocks.num_vectors - 1, 1))
    nprobes = nprobes_of(config, document)
    found: list[NDArray[np.int64]] = []
    milliseconds: dict[str, float] = {}
    compared: dict[str, float] = {}
    part = shards.parts[0]
    for nprobe in nprobes:
        began = time.monotonic()
        faiss_index.reset_counters()
        _, neighbors = shards.search(queries, k + 1, nprobe, config.retro_query_ef_search)
        milliseconds[str(nprobe)] = round(1000 * (time.monotonic() - began) / len(ids), 4)
        count = faiss_index.count_compared(part, len(ids))
        compared[str(nprobe)] = round(count * faiss_index.vector_bytes(part) / len(ids))
        found.append(drop_self(neighbors, ids))
    shares = measure_recall(queries, ids, np.stack(found), blocks.read(ROWS))
    curve = tuple(
        SearchRecall(nprobe=nprobe, recall=round(share, 6))
        for nprobe, share in zip(nprobes, shares, strict=True)
    )
    recall = Recall(neighbors=k, sample=len(ids), seed=config.seed, curve=curve)
    return recall, {"milliseconds_per_query": milliseconds, "bytes_per_query": compared}


def balance(sizes: NDArray[np.int64] | None) -> dict[str, float]:
    """How evenly vectors lie in lists: 1.0 is even; 2.0 makes an average search twice as long."""
    if sizes is None:
        return {}
    total = max(int(sizes.sum()), 1)
    return {
        "list_imbalance": round(float((sizes.astype(float) ** 2).sum()) * len(sizes) / total**2, 4),
        "empty_lists": int((sizes == 0).sum()),
    }


def drift(
    base: IndexDocument,
    recall: Recall,
    before: NDArray[np.int64] | None,
    after: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """What adding changed, with the number of lists that searches of the base visit.

    before, after: vectors in each list. Warns if the index should be trained again."""
    then = {} if base.recall is None else {s.nprobe: s.recall for s in base.recall.curve}
    now = {search.nprobe: search.recall for search in recall.curve}
    document: dict[str, Any] = {
        "nprobe": base.nprobe,
        "before": {"recall": then.get(base.nprobe), **balance(before)},
        "after": {"recall": now[base.nprobe], **balance(after)},
    }
    if before is not None and after is not None:
        document["lists_without_new"] = int((after == before).sum())
    log.info("drift %s", _line(document))
    reasons = _reasons(document)
    if reasons:
        log.warning(
            "what was added is unlike what the index was trained on: %s; train a new index on a "
            "sample of everything (faiss_train), and fill it",
            " and ".join(reasons),
        )
    return document


def _reasons(document: dict[str, Any]) -> list[str]:
    before, after = document["before"], document["after"]
    found = []
    if before["recall"] is not None and after["recall"] < before["recall"] - LOST_RECALL:
        found.append(f"recall {before['recall']:.3f} became {after['recall']:.3f}")
    if after.get("list_imbalance", 0) > MORE_IMBALANCE * before.get("list_imbalance", 1):
        found.append(f"list_imbalance {before['list_imbalance']} became {after['list_imbalance']}")
    return found


def _line(document: dict[str, Any]) -> str:
    pairs = [
        f"{name}_{when}={value}"
        for when in ("before", "after")
        for name, value in document[when].items()
    ]
    return " ".join([f"nprobe={document['nprobe']}", *pairs])
