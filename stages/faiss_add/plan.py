"""What is added to what: an index, the embeddings that it holds, those that it lacks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.faiss_add.config import FaissAddConfig
from trainyard.artifacts import inputs
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError
from trainyard.machine import memory_bytes
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import EMPTY, IndexDocument, read_index_document
from trainyard.retrieval.recall import sample_ids
from trainyard.retrieval.shards import open_shards
from trainyard.retrieval.vectors import EmbeddingBlocks, VectorBlock

log = logging.getLogger(__name__)

COMPARED = 100
"""Vectors of the base that are encoded again, to see that they are those in the index."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An index and all vectors that it is to hold."""

    document: IndexDocument
    """Of the index that is there."""
    blocks: EmbeddingBlocks

    @property
    def first(self) -> int:
        """Vectors that the index holds already."""
        return self.document.num_vectors

    @property
    def new(self) -> list[VectorBlock]:
        """The blocks that it lacks."""
        return [block for block in self.blocks.blocks if block.start >= self.first]

    def share(self, rank: int, world_size: int) -> list[VectorBlock]:
        """Neighbouring ones of these, so that a share has consecutive ids; none with few blocks."""
        new = self.new
        bounds = [len(new) * part // world_size for part in range(world_size + 1)]
        return new[bounds[rank] : bounds[rank + 1]]


def make_plan(config: FaissAddConfig) -> Plan:
    """Raises ConfigError for embeddings that do not belong to the index."""
    document = read_index_document(config.index, "--index")
    blocks = EmbeddingBlocks.joined(
        [EmbeddingBlocks.find(inputs.resolve(url, (url,)).files, url) for url in config.embeddings]
    )
    if blocks.dimensions != document.dimensions:
        raise ConfigError(
            f"--embeddings {config.embeddings[0]}: of {blocks.dimensions} dimensions, and the "
            f"index was trained on {document.dimensions}; train one on embeddings of the same model"
        )
    plan = Plan(document, _first_share(blocks, config.retro_index_add_load_fraction))
    if plan.first:
        _check_base(config, plan)
    _check_memory(document, plan.blocks.num_vectors)
    return plan


def open_base(config: FaissAddConfig, plan: Plan, scratch: Path) -> Any:
    """The index to add to. Raises ConfigError if it does not hold the first embeddings."""
    if not plan.first:
        inputs.check_listed(join(config.index, EMPTY), inputs.Manifests())
        index = faiss_index.read(inputs.fetch(join(config.index, EMPTY), scratch))
        faiss_index.check_described(index, plan.document, join(config.index, EMPTY))
        return index
    (index,) = open_shards(config.index, plan.document, scratch).parts
    if faiss_index.facts(index).has_codes:
        ids = sample_ids(plan.first, COMPARED, config.seed)
        codes, is_there = faiss_index.stored_codes(index, ids)
        same = (codes == faiss_index.encode(index, plan.blocks.rows(ids))).all(axis=1)
        if not (same & is_there).all():
            bad = int(ids[np.argmin(same & is_there)])
            raise ConfigError(
                f"--embeddings: vector {bad} is not the one that --index {config.index} holds; "
                "give first the embeddings that it was made of, in their order"
            )
    return index


def _check_base(config: FaissAddConfig, plan: Plan) -> None:
    """Refuse a filled index to which nothing can be added."""
    document = plan.document
    if document.add_fraction != 1 or config.retro_index_add_load_fraction != 1:
        raise ConfigError(
            "--retro-index-add-load-fraction: an index that holds a share of its embeddings cannot "
            "take more; fill one with all of them"
        )
    if document.num_shards > 1:
        raise ConfigError(
            f"--index {config.index} is in {document.num_shards} shards; join them without "
            "--keep-shards before more is added"
        )
    starts = {block.start for block in plan.blocks.blocks}
    if plan.first not in starts:
        raise ConfigError(
            f"--index {config.index} holds {plan.first:,} vectors, and none of --embeddings begins "
            f"there (there are {plan.blocks.num_vectors:,}); give those that it holds, then the "
            "new ones"
        )


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
