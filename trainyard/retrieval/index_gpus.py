"""Faiss's indices on GPUs, where the installed build has them and the machine too.

Distances are rounded in another way there, so neighbours at nearly equal distances may change
places. Vectors are encoded on the CPU wherever they are searched: validation, growth and shares
compare codes byte for byte."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from trainyard.retrieval.vectors import Vectors

log = logging.getLogger(__name__)

MOST = 2048
"""Lists and neighbours of a search that faiss's kernels take."""


def num_gpus() -> int:
    """GPUs that faiss can use; 0 for a build without."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def cluster_on_gpus(lists: Any) -> None:
    """Let an inverted file find its centers on all GPUs, if there are any."""
    if count := num_gpus():
        log.info("clustering on GPUs num_gpus=%d", count)
        lists.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(lists.d))


@dataclass(frozen=True, slots=True)
class OnGpus:
    """An index whose vectors are dealt out to the memory of all GPUs."""

    copy: Any

    def search(self, queries: Vectors, k: int) -> tuple[Vectors, NDArray[np.int64]]:
        """Squared distances and ids of the k nearest, both [queries, k]; id -1 for none."""
        distances, ids = self.copy.search(queries, k)
        return distances, ids


def copied(index: Any, k: int, nprobe: int) -> OnGpus | None:
    """A copy on all GPUs for such searches; None without GPUs, and where faiss has no kernel for
    them or the GPUs no room.

    index: a graph that finds its lists is not copied; GPUs compare all of their centers.
    nprobe: lists to search; 0 for an index without."""
    if not num_gpus():
        log.warning("searching on the CPU: faiss is built without GPUs, or finds none")
        return None
    if max(k, nprobe) > MOST:
        log.info("searching on the CPU: k=%d nprobe=%d above %d", k, nprobe, MOST)
        return None
    options = faiss.GpuMultipleClonerOptions()  # type: ignore[attr-defined, unused-ignore]
    options.shard = True  # each GPU has a part of every list
    options.allowCpuCoarseQuantizer = True  # for the kinds that are neither flat nor a graph
    try:
        with _lists_compared(index):
            copy = faiss.index_cpu_to_all_gpus(index, co=options)
        if nprobe:
            faiss.GpuParameterSpace().set_index_parameter(copy, "nprobe", nprobe)  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError as error:
        log.warning("searching on the CPU: faiss has no GPU index of it: %s", error)
        return None
    if not _is_on_gpus(copy):
        log.info("searching on the CPU: faiss has no GPU index of a %s", type(index).__name__)
        return None
    log.info("searching on GPUs num_gpus=%d", num_gpus())
    return OnGpus(copy)


@contextmanager
def _lists_compared(index: Any) -> Iterator[None]:
    """Give an inverted file whose lists a graph finds, which no GPU can search, their plain centers
    meanwhile."""
    lists: Any = faiss.try_extract_index_ivf(index)
    graph: Any = lists and faiss.downcast_index(lists.quantizer)
    graphs = (faiss.IndexHNSW, faiss.IndexNSG, faiss.IndexNNDescent)
    if not issubclass(type(graph), graphs):
        yield
        return
    plain: Any = faiss.IndexFlat(graph.d, graph.metric_type)
    plain.add(graph.reconstruct_n(0, graph.ntotal))
    is_own, lists.own_fields, lists.quantizer = lists.own_fields, False, plain
    try:
        yield
    finally:
        lists.quantizer, lists.own_fields = graph, is_own
        graph.this.disown()  # it belongs to the inverted file again
        plain.this.acquire()  # and these to Python, which frees them


def _is_on_gpus(copy: Any) -> bool:
    """Whether GPUs search it: of what it has no kernel for, faiss makes a copy on the CPU if there
    are several GPUs."""
    copy = faiss.downcast_index(copy)
    if isinstance(copy, faiss.IndexPreTransform):
        return _is_on_gpus(copy.index)
    if isinstance(copy, faiss.IndexShards):
        parts: Any = copy
        return all(_is_on_gpus(parts.at(place)) for place in range(parts.count()))
    return isinstance(copy, faiss.GpuIndex)  # type: ignore[attr-defined, unused-ignore]
