"""Recall of an index: how many of the nearest vectors it finds, against exact search.

recall@k is the mean, over a seeded sample of the vectors themselves, of the share of the k vectors
found that are no farther than the k-th nearest; the vector that is searched for does not count.
Judging by distance and not by id counts any of several equal vectors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trainyard.retrieval.vectors import Vectors

TOLERANCE = 1e-5
"""Of the squared lengths: a distance from a product of matrices is off by some roundings."""

ROWS = 2048
"""Vectors whose distances are computed at once."""

NOTHING = -1
"""Id of a neighbour that an index did not find."""


def sample_ids(num_vectors: int, size: int, seed: int) -> NDArray[np.int64]:
    """Increasing ids, drawn without replacement; all if there are fewer than `size`."""
    drawn = np.random.default_rng(seed).choice(num_vectors, min(size, num_vectors), replace=False)
    return np.sort(drawn).astype(np.int64)


def drop_self(found: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Neighbours without the vector that was searched for: [queries, k + 1] to [queries, k].

    The last is dropped where an index did not find the vector itself."""
    is_self = found == ids[:, None]
    is_self[~is_self.any(axis=1), -1] = True
    others: NDArray[np.int64] = found[~is_self].reshape(len(found), -1)
    return others


def measure_recall(
    queries: Vectors,
    ids: NDArray[np.int64],
    found: NDArray[np.int64],
    pieces: Iterable[tuple[int, Vectors]],
) -> list[float]:
    """recall@k of several searches, with one pass over all vectors.

    queries: [queries, dimensions], the vectors of `ids`. found: [searches, queries, k], without
    the queries themselves. pieces: the first id and the vectors of each piece."""
    k = found.shape[2]
    lengths = np.einsum("qd,qd->q", queries, queries)
    nearest = np.full((len(queries), k), np.inf, np.float32)
    distances = np.full(found.shape, np.inf, np.float32)
    for first, vectors in pieces:
        piece = lengths[:, None] - 2 * (queries @ vectors.T)
        piece += np.einsum("vd,vd->v", vectors, vectors)
        own = np.flatnonzero((ids >= first) & (ids < first + len(vectors)))
        piece[own, ids[own] - first] = np.inf
        search, query, rank = np.nonzero((found >= first) & (found < first + len(vectors)))
        distances[search, query, rank] = piece[query, found[search, query, rank] - first]
        both = np.concatenate((nearest, piece), axis=1)
        nearest = np.partition(both, k - 1, axis=1)[:, :k]
    farthest = nearest.max(axis=1) + TOLERANCE * np.maximum(lengths, 1e-30)
    is_right = np.isfinite(distances) & (distances <= farthest[None, :, None])
    # With fewer than k other vectors, the missing ones are not to be found.
    num_nearest = np.isfinite(nearest).sum()
    return [float(right.sum() / max(num_nearest, 1)) for right in is_right]
