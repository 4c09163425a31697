"""Which of the found chunks become neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainyard.retrieval.corpora import build, write_two
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.neighbor_filter import DocumentChunks, OwnChunks, keep_nearest

IDS = st.lists(st.lists(st.integers(-1, 30), min_size=4, max_size=4), min_size=1, max_size=12)


@given(ids=IDS, count=st.integers(1, 6), seed=st.integers(0, 9))
def test_the_first_allowed_are_kept_in_order_and_padding_is_behind(
    ids: list[list[int]], count: int, seed: int
) -> None:
    found = np.array(ids)
    rng = np.random.default_rng(seed)
    distances = np.sort(rng.random(found.shape), axis=1).astype(np.float32)
    allowed = (rng.random(found.shape) < 0.6) & (found >= 0)
    kept, lengths = keep_nearest(found, distances, allowed, count)
    for row, mine in enumerate(kept.tolist()):
        wanted = found[row][allowed[row]][:count].tolist()
        assert mine == wanted + [-1] * (count - len(wanted))
        near = distances[row][allowed[row]][:count].tolist()
        assert lengths[row].tolist() == near + [np.inf] * (count - len(near))


@given(
    ids=IDS,
    per_sample=st.integers(1, 3),
    first=st.integers(0, 1000),
    ranges=st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 30), st.integers(0, 5)), max_size=12
    ),
)
def test_own_chunks_are_those_in_a_range_of_the_sample(
    ids: list[list[int]], per_sample: int, first: int, ranges: list[tuple[int, int, int]]
) -> None:
    found = np.array(ids)
    samples = first + np.arange(len(found)) // per_sample
    # Documents of a sample are different ones, so their ranges do not overlap.
    disjoint: list[tuple[int, int, int]] = []
    for sample, begin, length in ranges:
        end = min(begin + length, 31)
        if all(s != sample or end <= b or e <= begin for s, b, e in disjoint):
            disjoint.append((sample, begin, end))
    table = np.array(disjoint, np.int64).reshape(-1, 3)
    own = OwnChunks(table[:, 0] + first, table[:, 1], table[:, 2], 31)
    expected = [
        [any(s + first == sample and b <= i < e for s, b, e in disjoint) for i in row]
        for row, sample in zip(found.tolist(), samples.tolist(), strict=True)
    ]
    assert own.among(found, samples).tolist() == expected


@pytest.fixture
def database(tmp_path: Path) -> ChunkDatabase:
    build(tmp_path, write_two(tmp_path))
    return ChunkDatabase(str(tmp_path / "db"))


def test_a_document_has_the_chunks_of_its_rows(database: ChunkDatabase) -> None:
    documents = DocumentChunks(database)
    pairs = [(d, n) for d in range(3) for n in range(10)]
    begins, ends = documents.ranges(*np.array(pairs).T)
    for (dataset, document), begin, end in zip(pairs, begins, ends, strict=True):
        rows = (database.chunks[:, :2] == (dataset, document)).all(axis=1)
        assert np.flatnonzero(rows).tolist() == list(range(begin, end))
