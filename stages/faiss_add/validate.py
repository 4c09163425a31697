"""Encodes a sample of blocks again, and compares with the codes in the index of an output."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from stages.faiss_add.config import FaissAddConfig
from stages.faiss_add.fill import rows_at_once
from stages.faiss_add.plan import Plan
from stages.runtime.context import StageRun
from stages.runtime.validation import check_same_run, sample_blocks
from trainyard.artifacts import store
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import DOCUMENT, IndexDocument
from trainyard.retrieval.shards import Shards, open_shards

log = logging.getLogger(__name__)


def validate(config: FaissAddConfig, stage: StageRun, plan: Plan) -> dict[str, Any]:
    """Raises DataError for the first vector with other codes than the index has."""
    assert config.retro_task_validate is not None
    check_same_run(config, stage, Output.directory(config.output_dir))
    where = join(config.output_dir, DOCUMENT)
    document = IndexDocument.from_document(store.read_json(where), where)
    if document.num_vectors != plan.blocks.num_vectors:
        raise ArtifactError(
            f"{where}: {document.num_vectors} vectors, and --embeddings have "
            f"{plan.blocks.num_vectors}; fill the index again"
        )
    shards = open_shards(config.output_dir, document, stage.scratch)
    if not faiss_index.facts(shards.parts[0]).has_codes:
        raise ConfigError(
            f"--retro-task-validate: {document.index_str} has no codes to compare; its recall in "
            f"{where} was measured with the vectors"
        )
    blocks = plan.blocks.blocks
    chosen = sample_blocks(len(blocks), config.retro_task_validate)
    count = 0
    for block in (blocks[number] for number in chosen):
        for start, vectors in plan.blocks.read_block(block, rows_at_once(plan.blocks)):
            ids = np.arange(start, start + len(vectors))
            _compare(shards, ids, faiss_index.encode(shards.parts[0], vectors), config.output_dir)
        count += len(block)
    print(
        f"{config.output_dir}: {len(chosen)} of {len(blocks)} blocks encoded again, {count:,} "
        "vectors; all as in the index"
    )
    return {"blocks": len(chosen), "vectors": count}


def _compare(shards: Shards, ids: Any, codes: faiss_index.Codes, where: str) -> None:
    same = np.zeros(len(ids), np.bool_)
    first = 0
    for part in shards.parts:
        own = ids if faiss_index.keeps_ids(part) else ids - first
        stored, is_there = faiss_index.stored_codes(part, own)
        same |= is_there & (stored == codes).all(axis=1)
        first += int(part.ntotal)
    if not same.all():
        raise DataError(
            f"{where}: the code of vector {ids[int(np.argmin(same))]} in the index is not that of "
            "its embedding; fill the index again (--force)"
        )
