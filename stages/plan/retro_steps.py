"""What the steps of building Retro's neighbours take, scaled from small runs. Pure arithmetic.

The work of a step:

    database, embeddings   chunks
    train                  rounds of k-means x training vectors x lists x dimensions
    add                    vectors x dimensions x centroids that each is compared with
    query                  bytes that a query is compared with: centroids, and codes of its lists

A flat coarse quantizer compares with every centroid. A graph (HNSW) compares with about
67 x log2(lists) where it visits 16, and with 500 x log2(lists) where it visits 256 (measured with
faiss 1.15 for 16,384 and 65,536 centroids of 64 dimensions), each at random places of the memory,
which takes as long as 15 in order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stages.plan.retro_sample import IndexSample, Measured, fit
from trainyard.retrieval.index_choice import (
    BYTE_CODES,
    GRAPH_LISTS,
    MOST_POINTS_PER_LIST,
    choose_index,
)

ROUNDS = 10
TRAINING_POINTS = 40
"""Default number of chunks that train each list; faiss needs 39."""
OF_ADDING, OF_QUERY = 67, 500
RANDOM = 15
PRODUCT_BYTES = 64
"""Code of a vector where a byte a dimension is too much (`retrieval.index_choice`)."""
ID_BYTES = 8
GIGABYTE = 1e9
BASE_GB = 0.5
"""A process with its libraries; files that it maps are not counted, as they can be dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step takes."""

    name: str
    seconds: float
    """On one node like the measured one."""
    memory_gb: float
    disk_gb: float
    nodes: int
    """That it is shared over."""
    alone: float = 0.0
    """Of the seconds, those that one node spends after the shares of all: it joins them."""
    note: str = ""

    @property
    def seconds_on_nodes(self) -> float:
        """With all its nodes."""
        return (self.seconds - self.alone) / self.nodes + self.alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to plan for."""

    chunks: int
    query_chunks: int
    training: int
    hours: float
    node_memory_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroPlan:
    """An index and the steps that build and use it."""

    index_str: str
    reason: str
    num_lists: int
    nprobe: int
    steps: tuple[Step, ...]


def default_training(chunks: int) -> int:
    """Chunks that train an index of 4 x sqrt(chunks) lists."""
    return min(chunks, math.ceil(TRAINING_POINTS * 4 * math.sqrt(chunks)))


def plan_retro(target: Target, measured: Measured) -> RetroPlan:
    """Each step for the target."""
    samples = [index for index, _, _ in measured.adding]
    largest = max(samples, key=lambda index: index.num_vectors)
    choice = choose_index(target.chunks, largest.dimensions, target.training)
    lists = _lists(choice.index_str)
    wanted = largest.nprobe * math.sqrt(lists / largest.num_lists) if lists else 1
    nprobe = min(math.ceil(wanted), max(lists, 1))
    index = IndexSample(
        target.chunks, largest.dimensions, lists, nprobe, largest.imbalance, choice.index_str
    )
    vector_gb = 4 * index.dimensions / GIGABYTE
    index_gb = (target.chunks * (code_bytes(index) + ID_BYTES) + lists * 4 * index.dimensions) / (
        GIGABYTE
    )
    used = min(target.training, MOST_POINTS_PER_LIST * lists) if lists else 0
    embedding, queries = fit(measured.embedding), query_bytes(index)
    adding, rest = _add_seconds(measured, index)
    whole_query = fit([(query_bytes(i), s) for i, s in measured.queries]).at(queries)
    steps = (
        _one("retro_db", fit(measured.database).at(target.chunks), target, disk=_database_gb(
            measured, target.chunks)),
        _shared("retro_embed, sampled", embedding.at(target.training), target,
            disk=target.training * vector_gb),
        _one("faiss_train", _train_seconds(measured, index, used), target,
            memory=2 * used * vector_gb, disk=lists * vector_gb),
        _shared("retro_embed, train", embedding.at(target.chunks), target,
            disk=target.chunks * vector_gb),
        _shared("faiss_add", adding + rest, target, alone=rest, memory=index_gb, disk=index_gb),
        _shared("retro_embed, samples", embedding.at(target.query_chunks), target,
            disk=target.query_chunks * vector_gb),
        _shared("faiss_query", whole_query * target.query_chunks, target, memory=index_gb,
            disk=target.query_chunks * 12 * measured.num_saved / GIGABYTE),
    )  # fmt: skip
    return RetroPlan(
        index_str=choice.index_str,
        reason=choice.reason,
        num_lists=lists,
        nprobe=nprobe,
        steps=steps,
    )


def _one(
    name: str, seconds: float, target: Target, *, memory: float = 0.0, disk: float = 0.0
) -> Step:
    """A step of one process."""
    return _shared(name, seconds, target, alone=seconds, memory=memory, disk=disk)


def _shared(
    name: str,
    seconds: float,
    target: Target,
    *,
    alone: float = 0.0,
    memory: float = 0.0,
    disk: float = 0.0,
) -> Step:
    """A step in shares (--rank, --world-size), and `alone` of its seconds on one node. Each node
    needs the memory."""
    limit, needed, notes = 3600 * target.hours, BASE_GB + memory, []
    if needed > target.node_memory_gb:
        notes.append(f"needs more than {target.node_memory_gb:g} GB of memory")
    if alone > limit:
        part = "all of it" if alone == seconds else "the end of it"
        notes.append(f"takes more than {target.hours:g} h, and one node does {part}")
    shared = seconds - alone
    nodes = max(math.ceil(shared / (limit - alone)), 1) if alone < limit else 1
    return Step(
        name=name,
        seconds=seconds,
        alone=alone,
        memory_gb=needed,
        disk_gb=disk,
        nodes=nodes,
        note="; ".join(notes),
    )


# --- work -----------------------------------------------------------------------------------------


def _lists(index_str: str) -> int:
    """Lists of one of the indices that `choose_index` chooses."""
    part = next((word for word in index_str.split(",") if word.startswith("IVF")), "IVF0")
    return int(part.removeprefix("IVF").partition("_")[0])


def code_bytes(index: IndexSample) -> int:
    """Of a vector, as `choose_index` keeps it."""
    if not index.num_lists:
        return 4 * index.dimensions
    is_product = "PQ" in index.index_str or index.num_vectors * index.dimensions > BYTE_CODES
    return min(PRODUCT_BYTES, index.dimensions) if is_product else index.dimensions


def compared(index: IndexSample, of_graph: int) -> float:
    """Centroids that a vector is compared with, in order."""
    if index.num_lists < GRAPH_LISTS:
        return index.num_lists
    return RANDOM * of_graph * math.log2(index.num_lists)


def query_bytes(index: IndexSample) -> float:
    """Bytes that a query is compared with."""
    if not index.num_lists:
        return index.num_vectors * 4.0 * index.dimensions
    share = min(index.nprobe / index.num_lists * index.imbalance, 1.0)
    codes = share * index.num_vectors * code_bytes(index)
    return compared(index, OF_QUERY) * 4 * index.dimensions + codes


def _train_seconds(measured: Measured, index: IndexSample, used: int) -> float:
    def work(vectors: int, of: IndexSample) -> float:
        return float(ROUNDS) * vectors * of.num_lists * of.dimensions

    if not used:
        return 0.0
    return fit([(work(n, of), s) for n, of, s in measured.training]).at(work(used, index))


def _add_seconds(measured: Measured, index: IndexSample) -> tuple[float, float]:
    """Of adding, and of the rest: reading, recall, writing."""

    def work(of: IndexSample) -> float:
        return of.num_vectors * of.dimensions * max(compared(of, OF_ADDING), 1.0)

    adding = fit([(work(of), s) for of, s, _ in measured.adding]).at(work(index))
    rest = [(float(of.num_vectors * of.dimensions), s) for of, _, s in measured.adding]
    return adding, fit(rest).at(float(index.num_vectors * index.dimensions))


def _database_gb(measured: Measured, chunks: int) -> float:
    return fit(measured.database_bytes).at(chunks) / GIGABYTE
