"""Shares of an index, each with the vectors of consecutive ids, joined to one and compared."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from trainyard.retrieval import index_memory
from trainyard.retrieval.index_document import ADDED
from trainyard.retrieval.recall import sample_ids
from trainyard.retrieval.shards import Shards, nearest_of, search_part

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


@dataclass(frozen=True, slots=True)
class ShareFile:
    """A share on this machine, compared with its manifest."""

    path: Path
    url: str
    count: int
    """Vectors that it must hold."""


def share_files(config: FaissAddConfig, stage: StageRun, plan: Plan) -> list[ShareFile]:
    """All shares. Raises ArtifactError for a missing one, and for one that is not as it was."""
    assert config.world_size is not None
    shares = [Output.directory(config.share_folder(rank)) for rank in range(config.world_size)]
    found = []
    for rank, manifest in enumerate(share_manifests(stage, shares, "faiss_add")):
        url = shares[rank].file_url(ADDED)
        record = manifest.record(ADDED)
        if record is None:
            raise ArtifactError(f"{shares[rank].manifest_url}: does not list {ADDED}")
        check_digest(url, record, inputs.read_digest(url))
        count = sum(map(len, plan.share(rank, config.world_size)))
        found.append(ShareFile(inputs.fetch(url, stage.scratch), url, count))
    return found


def open_shares(config: FaissAddConfig, stage: StageRun, plan: Plan) -> Shards:
    """The old vectors, if there are any, and all shares."""
    base = [open_base(config, plan, stage.scratch)] if plan.first else []
    return Shards((*base, *(_open(plan, file) for file in share_files(config, stage, plan))))


def _open(plan: Plan, file: ShareFile) -> Any:
    part = faiss_index.read(file.path)
    faiss_index.check_described(part, plan.document, file.url, file.count)
    return part


def merge(config: FaissAddConfig, stage: StageRun, plan: Plan) -> tuple[Any, Shards]:
    """Vectors in each list before, and all vectors in one index, which answers as the shares do.

    One share at a time is in memory beside that index. DataError if it answers otherwise."""
    ids = sample_ids(plan.blocks.num_vectors, COMPARED, config.seed)
    k = min(config.retro_query_num_neighbors_save + 1, plan.blocks.num_vectors)
    nprobe = min(nprobes_of(config, plan.document)[-1], LISTS)
    search = (plan.blocks.rows(ids), k, nprobe, config.retro_query_ef_search)
    whole = open_base(config, plan, stage.scratch)
    before, first = faiss_index.list_sizes(whole), int(whole.ntotal)
    found = [search_part(whole, 0, *search)] if first else []
    files, counts = share_files(config, stage, plan), []
    for file in files:
        part = _open(plan, file)
        found.append(search_part(part, first, *search))
        counts.append(_sizes(part))
        first += file.count
    added = np.sum(counts, axis=0)
    expected = added + _sizes(whole)
    index_memory.reserve(whole, added)
    for file in files:
        faiss_index.append(whole, faiss_index.load(file.path))
    joined = Shards((whole,))
    _refuse_other(plan, joined, expected)
    wanted, after = nearest_of(found, k), joined.search(*search)
    same = (wanted[0] == after[0]).all(axis=1) & (wanted[1] == after[1]).all(axis=1)
    if not same.all():
        raise DataError(
            f"merge: the joined index finds other neighbours of vector {ids[int(np.argmin(same))]} "
            "than its shares; it is not published, as a share was changed or there is a defect; "
            "remove the shares and make them again"
        )
    log.info("merged shards=%d vectors=%d compared=%d", len(found), joined.num_vectors, len(ids))
    return before, joined


def _sizes(index: Any) -> NDArray[np.int64]:
    """Vectors in each list, or in the index where it has none."""
    sizes = faiss_index.list_sizes(index)
    return np.array([index.ntotal]) if sizes is None else sizes


def _refuse_other(plan: Plan, joined: Shards, sizes: NDArray[np.int64]) -> None:
    """Refuse a joined index that does not hold every vector once."""
    same_lists = np.array_equal(sizes, _sizes(joined.parts[0]))
    if joined.num_vectors != plan.blocks.num_vectors or not same_lists:
        lists = "" if same_lists else ", and its lists are not as long as those of its shares"
        raise DataError(
            f"merge: the joined index holds {joined.num_vectors} vectors, wanted "
            f"{plan.blocks.num_vectors}{lists}; remove the shares and make them again"
        )


def shard_files(config: FaissAddConfig, plan: Plan) -> Sequence[str]:
    """URLs of the files of all shards, in order."""
    assert config.world_size is not None
    folders = [config.index] if plan.first else []
    folders += [config.share_folder(rank) for rank in range(config.world_size)]
    return [join(folder, ADDED) for folder in folders]
