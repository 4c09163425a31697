"""A filled index in one file or several, searched as one.

Each shard holds vectors of consecutive ids and was trained as the others. The nearest of all are
among the nearest of each, so a search asks every shard and keeps the nearest. Equal distances are
in the order of ids, as faiss has them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import inputs
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import DOCUMENT, IndexDocument, shard_names
from trainyard.retrieval.index_gpus import OnGpus, copied
from trainyard.retrieval.recall import NOTHING
from trainyard.retrieval.vectors import Vectors

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of an index, in the order of their ids."""

    parts: tuple[Any, ...]
    """Indices of faiss."""

    @property
    def num_vectors(self) -> int:
        """Vectors in all of them."""
        return sum(int(part.ntotal) for part in self.parts)

    def search(self, queries: Vectors, k: int, nprobe: int, ef_search: int) -> tuple[Vectors, Ints]:
        """As `index.search`: squared distances and ids of the k nearest, both [queries, k]."""
        if len(self.parts) == 1:
            return faiss_index.search(self.parts[0], queries, k, nprobe, ef_search)
        found: list[tuple[Vectors, Ints]] = []
        first = 0
        for part in self.parts:
            found.append(search_part(part, first, queries, k, nprobe, ef_search))
            first += int(part.ntotal)
        return nearest_of(found, k)

    def on_gpus(self, k: int, nprobe: int, ef_search: int) -> OnGpus | None:
        """A copy on all GPUs for such searches; None where the CPU has to search, which the log
        explains."""
        if len(self.parts) > 1:
            log.warning("searching on the CPU: the index is in %d files", len(self.parts))
            return None
        (index,) = self.parts
        faiss_index.set_up(index, k, nprobe, ef_search)
        return copied(index, k, min(nprobe, faiss_index.facts(index).num_lists))

    def list_sizes(self) -> Ints | None:
        """Vectors in each list, over all shards; None without lists."""
        sizes = [faiss_index.list_sizes(part) for part in self.parts]
        return None if sizes[0] is None else np.sum([s for s in sizes if s is not None], axis=0)


def search_part(
    part: Any, first: int, queries: Vectors, k: int, nprobe: int, ef_search: int
) -> tuple[Vectors, Ints]:
    """Distances and ids of one shard. first: id of its first vector."""
    distances, ids = faiss_index.search(part, queries, k, nprobe, ef_search)
    if not faiss_index.keeps_ids(part):
        ids = np.where(ids == NOTHING, NOTHING, ids + first)
    return np.where(ids == NOTHING, np.float32(np.inf), distances), ids


def nearest_of(found: Sequence[tuple[Vectors, Ints]], k: int) -> tuple[Vectors, Ints]:
    """The nearest of what all shards found."""
    distances = np.concatenate([one for one, _ in found], axis=1)
    ids = np.concatenate([one for _, one in found], axis=1)
    order = np.lexsort((ids, distances), axis=1)[:, :k]
    distances = np.take_along_axis(distances, order, axis=1)
    ids = np.take_along_axis(ids, order, axis=1)
    # What faiss says where it finds nothing.
    return np.where(ids == NOTHING, np.finfo(np.float32).max, distances), ids


def open_shards(folder_url: str, document: IndexDocument, scratch: Path) -> Shards:
    """The filled index in a folder. Raises ArtifactError for a file that is none, or damaged, and
    for an index that is not the one of the document."""
    parts = []
    for name in shard_names(document.num_shards):
        inputs.check_in_folder(folder_url, name)
        parts.append(faiss_index.read(inputs.fetch(join(folder_url, name), scratch)))
    shards = Shards(tuple(parts))
    for part, name in zip(parts, shard_names(document.num_shards), strict=True):
        faiss_index.check_described(part, document, join(folder_url, name), int(part.ntotal))
    if shards.num_vectors != document.num_vectors:
        raise ArtifactError(
            f"{folder_url}: its files hold {shards.num_vectors} vectors, and {DOCUMENT} says "
            f"{document.num_vectors}; build the index again"
        )
    return shards
