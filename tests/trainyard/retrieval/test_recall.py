from __future__ import annotations

import numpy as np
import pytest

from tests.trainyard.retrieval.embedded import clustered
from trainyard.retrieval.recall import drop_self, measure_recall, sample_ids


def nearest(vectors: np.ndarray, ids: np.ndarray, k: int) -> np.ndarray:
    """Plain: the k nearest of each, in order, without itself."""
    found = []
    for i in ids:
        distances = ((vectors.astype(np.float64) - vectors[i]) ** 2).sum(axis=1)
        distances[i] = np.inf
        found.append(np.argsort(distances, kind="stable")[:k])
    return np.array(found)


@pytest.mark.parametrize("rows", [10, 64, 1000])
def test_recall_is_the_share_of_the_nearest_that_were_found(rows: int) -> None:
    vectors = clustered(300, 8)
    ids = sample_ids(300, 20, seed=1)
    exact = nearest(vectors, ids, 10)
    half = exact.copy()
    half[:, 5:] = -1
    wrong = nearest(-vectors, ids, 299)[:, -10:]
    pieces = [(first, vectors[first : first + rows]) for first in range(0, 300, rows)]
    found = np.stack([exact, exact[:, ::-1], half, wrong])
    assert measure_recall(vectors[ids], ids, found, pieces) == pytest.approx(
        [1.0, 1.0, 0.5, np.mean([np.isin(a, b).mean() for a, b in zip(wrong, exact, strict=True)])]
    )


def test_any_of_several_equal_vectors_counts() -> None:
    vectors = np.repeat(clustered(20, 8), 10, axis=0)
    ids = sample_ids(200, 20, seed=1)
    others = [[i // 10 * 10 + j for j in range(10) if i // 10 * 10 + j != i] for i in ids]
    found = np.array([np.array(others)[:, :3], np.array(others)[:, -3:]])
    assert measure_recall(vectors[ids], ids, found, [(0, vectors)]) == [1.0, 1.0]


def test_fewer_vectors_than_neighbors() -> None:
    vectors = clustered(4, 8)
    ids = np.arange(4)
    found = np.stack([np.pad(nearest(vectors, ids, 3), ((0, 0), (0, 2)), constant_values=-1)])
    assert measure_recall(vectors, ids, found, [(0, vectors)]) == [1.0]


def test_the_searched_vector_is_dropped_wherever_it_stands() -> None:
    found = np.array([[7, 1, 2], [1, 7, 2], [1, 2, 7], [1, 2, 3]])
    assert drop_self(found, np.full(4, 7)).tolist() == [[1, 2]] * 4


def test_a_sample_is_seeded_and_has_no_id_twice() -> None:
    first, again, other = (sample_ids(1000, 100, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert (np.diff(first) > 0).all()
    assert sample_ids(5, 100, 1).tolist() == [0, 1, 2, 3, 4]
