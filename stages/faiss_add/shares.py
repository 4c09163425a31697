"""Shares of an index, each with the vectors of consecutive ids, joined to one and compared."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.faiss_add.config import FaissAddConfig
from stages.faiss_add.fill import fill
from stages.faiss_add.measure import nprobes_of
from stages.faiss_add.plan import Plan, open_base
from stages.runtime.context import StageRun
from stages.runtime.joined_shares import share_manifests
from trainyard.artifacts import inputs
from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import ADDED
from trainyard.retrieval.recall import sample_ids
from trainyard.retrieval.shards import Shards

log = logging.getLogger(__name__)

COMPARED, LISTS = 200, 64
"""Vectors that are searched for in shares and in the joined index, and lists that are visited."""


def write_share(config: FaissAddConfig, stage: StageRun, plan: Plan) -> int:
    """Write a share of the new vectors, in an index without the old ones; returns their number."""
    assert config.rank is not None
    assert config.world_size is not None
    blocks = plan.share(config.rank, config.world_size)
    index = open_base(config, plan, stage.scratch)
    if not faiss_index.facts(index).has_codes:
        raise ConfigError(
            f"--world-size {config.world_size}: {plan.document.index_str} has no codes that could "
            "be added in shares; leave --world-size out"
        )
    index.reset()
    fill(index, plan.blocks, blocks, stage)
    with stage.open(ADDED) as file, io.BufferedWriter(file) as buffered:
        faiss_index.write(index, buffered)
    return sum(map(len, blocks))


def open_shares(config: FaissAddConfig, stage: StageRun, plan: Plan) -> Shards:
    """The old vectors, if there are any, and all shares."""
    assert config.world_size is not None
    base = open_base(config, plan, stage.scratch)
    shares = [Output.directory(config.share_folder(rank)) for rank in range(config.world_size)]
    parts = [base] if plan.first else []
    for rank, manifest in enumerate(share_manifests(stage, shares, "faiss_add")):
        url = shares[rank].file_url(ADDED)
        record = manifest.record(ADDED)
        if record is None:
            raise ArtifactError(f"{shares[rank].manifest_url}: does not list {ADDED}")
        check_digest(url, record, inputs.read_digest(url))
        part = faiss_index.read(inputs.fetch(url, stage.scratch))
        count = sum(map(len, plan.share(rank, config.world_size)))
        faiss_index.check_described(part, plan.document, url, count)
        parts.append(part)
    return Shards(tuple(parts))


def merge(config: FaissAddConfig, plan: Plan, shards: Shards) -> Shards:
    """All vectors in one index, which answers as the shards did. Raises DataError otherwise."""
    ids = sample_ids(plan.blocks.num_vectors, COMPARED, config.seed)
    queries, nprobe = plan.blocks.rows(ids), nprobes_of(config, plan.document)[-1]
    k = min(config.retro_query_num_neighbors_save + 1, plan.blocks.num_vectors)
    nprobe, ef_search = min(nprobe, LISTS), config.retro_query_ef_search
    before, sizes = shards.search(queries, k, nprobe, ef_search), shards.list_sizes()
    whole, *rest = shards.parts
    for part in rest:
        faiss_index.append(whole, part)
    joined = Shards((whole,))
    after = joined.search(queries, k, nprobe, ef_search)
    _refuse_other(plan, joined, sizes)
    same = (before[0] == after[0]).all(axis=1) & (before[1] == after[1]).all(axis=1)
    if not same.all():
        raise DataError(
            f"merge: the joined index finds other neighbours of vector {ids[int(np.argmin(same))]} "
            "than its shares; it is not published, as a share was changed or there is a defect; "
            "remove the shares and make them again"
        )
    log.info("merged shards=%d vectors=%d compared=%d", len(rest) + 1, joined.num_vectors, len(ids))
    return joined


def _refuse_other(plan: Plan, joined: Shards, sizes: Any) -> None:
    """Refuse a joined index that does not hold every vector once."""
    same_lists = np.array_equal(np.asarray(sizes), np.asarray(joined.list_sizes()))
    if joined.num_vectors != plan.blocks.num_vectors or not same_lists:
        raise DataError(
            f"merge: the joined index holds {joined.num_vectors} vectors, wanted "
            f"{plan.blocks.num_vectors}; remove the shares and make them again"
        )


def shard_files(config: FaissAddConfig, plan: Plan) -> Sequence[str]:
    """URLs of the files of all shards, in order."""
    assert config.world_size is not None
    folders = [config.index] if plan.first else []
    folders += [config.share_folder(rank) for rank in range(config.world_size)]
    return [join(folder, ADDED) for folder in folders]
