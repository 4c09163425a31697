"""Add the vectors that the index lacks, measure recall and drift, publish."""

from __future__ import annotations

import io
import logging
import time
from dataclasses import replace
from typing import Any

from stages.faiss_add.config import FaissAddConfig
from stages.faiss_add.fill import fill
from stages.faiss_add.measure import balance, drift, recall_of
from stages.faiss_add.plan import Plan, make_plan, open_base
from stages.faiss_add.shares import merge, open_shares, shard_files, write_share
from stages.faiss_add.validate import validate
from stages.runtime.context import StageRun
from stages.runtime.finished_files import copy_file
from trainyard.artifacts.store import info
from trainyard.errors import DataError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import (
    ADDED,
    DOCUMENT,
    IndexDocument,
    Recall,
    SearchRecall,
    shard_names,
)
from trainyard.retrieval.shards import Shards

log = logging.getLogger(__name__)


def run(config: FaissAddConfig, stage: StageRun) -> dict[str, Any]:
    """Write the filled index and `index.json` with its recall, or a share of it."""
    plan = make_plan(config)
    if config.retro_task_validate is not None:
        return validate(config, stage, plan)
    began = time.monotonic()
    if config.rank is not None:
        count = write_share(config, stage, plan)
        return {"vectors": count, "add_seconds": time.monotonic() - began}
    before, shards = _filled(config, stage, plan)
    seconds = time.monotonic() - began

    recall, costs = recall_of(config, plan.document, shards, plan.blocks)
    chosen = _chosen(config, plan.document, recall)
    if chosen.recall < config.retro_min_recall:
        raise DataError(_recall_message(config, plan.document, recall, chosen))
    _write(config, stage, plan, shards)
    filled = replace(
        plan.document,
        num_vectors=plan.blocks.num_vectors,
        add_fraction=config.retro_index_add_load_fraction,
        num_shards=len(shards.parts),
        nprobe=chosen.nprobe,
        recall=recall,
    )
    stage.write_json(DOCUMENT, filled.to_document())
    sizes = shards.list_sizes()
    return {
        "vectors": plan.blocks.num_vectors,
        "add_seconds": seconds,
        "recall": chosen.recall,
        "nprobe": chosen.nprobe,
        **costs,
        **balance(sizes),
        **({"drift": drift(plan.document, recall, before, sizes)} if plan.first else {}),
    }


def _filled(config: FaissAddConfig, stage: StageRun, plan: Plan) -> tuple[Any, Shards]:
    """Vectors in each list before something was added, None without lists, and the index."""
    if config.world_size is not None:
        if not config.keep_shards:
            return merge(config, stage, plan)
        shards = open_shares(config, stage, plan)
        return faiss_index.list_sizes(shards.parts[0]), shards
    index = open_base(config, plan, stage.scratch)
    before = faiss_index.list_sizes(index)
    fill(index, plan.blocks, plan.new, stage)
    return before, Shards((index,))


def _chosen(config: FaissAddConfig, document: IndexDocument, recall: Recall) -> SearchRecall:
    """The search that a query does by default."""
    chosen = recall.cheapest(config.target_recall)
    if config.retro_query_nprobe is not None:
        wanted = min(config.retro_query_nprobe, max(document.num_lists, 1))
        chosen = next(search for search in recall.curve if search.nprobe == wanted)
    log.info(
        "recall@%d=%.3f nprobe=%d sample=%d",
        *(recall.neighbors, chosen.recall, chosen.nprobe, recall.sample),
    )
    return chosen


def _write(config: FaissAddConfig, stage: StageRun, plan: Plan, shards: Shards) -> None:
    if len(shards.parts) == 1:
        with stage.open(ADDED) as file, io.BufferedWriter(file) as buffered:
            faiss_index.write(shards.parts[0], buffered)
        return
    files = dict(zip(shard_names(len(shards.parts)), shard_files(config, plan), strict=True))
    size = sum(info(url).size_bytes for url in files.values())
    with stage.progress(size, "bytes", "copy") as progress:
        for name, url in files.items():
            copy_file(stage, url, name, on_bytes=progress.update)


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
