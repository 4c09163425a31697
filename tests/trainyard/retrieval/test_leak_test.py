"""The leak test refuses every kind of wrong neighbour."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.trainyard.retrieval.samples import Yard, make_yard
from trainyard.errors import DataError
from trainyard.retrieval.leak_test import check_neighbors

PAIRS = [(0, 0), (1, 1)]
START = 8


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return make_yard(tmp_path_factory.mktemp("yard"), documents=30)


@pytest.fixture
def allowed(yard: Yard) -> NDArray[np.int64]:
    """(6, 3) neighbours of the chunks from `START` on, the last row with padding."""
    chunks, rows = yard.chunks(), yard.database().chunks[:, :2]
    table = np.full((6, 3), -1)
    for row in range(6):
        sample = (START + row) // chunks.chunks_per_sample
        own = chunks.documents(sample, sample + 1)[:, 1:].tolist()
        others = [i for i, pair in enumerate(rows.tolist()) if pair not in own]
        table[row] = others[row : row + 3]
    table[-1, 1:] = -1
    return table


def check(yard: Yard, table: NDArray[np.int64], excluded: NDArray[np.bool_] | None = None) -> None:
    check_neighbors(table, START, yard.chunks(), yard.database(), PAIRS, excluded)


def test_a_right_table_passes(yard: Yard, allowed: NDArray[np.int64]) -> None:
    check(yard, allowed)
    check(yard, np.full((0, 3), -1))
    check(yard, allowed, np.zeros(len(yard.database()), np.bool_))


@pytest.mark.parametrize("chunk", [-2, 10**6])
def test_a_number_without_a_chunk_is_refused(
    yard: Yard, allowed: NDArray[np.int64], chunk: int
) -> None:
    allowed[3, 1] = chunk
    with pytest.raises(DataError, match=f"neighbour {chunk} of chunk 11 is no chunk"):
        check(yard, allowed)


def test_a_neighbor_behind_padding_is_refused(yard: Yard, allowed: NDArray[np.int64]) -> None:
    allowed[5] = allowed[5, 0], -1, allowed[4, 0]
    with pytest.raises(DataError, match="of chunk 13 follows -1"):
        check(yard, allowed)


def test_a_document_of_the_sample_is_refused_wherever_it_stands(
    yard: Yard, allowed: NDArray[np.int64]
) -> None:
    """Also in the row of another chunk of the sample, and of another dataset."""
    chunks, rows = yard.chunks(), yard.database().chunks[:, :2]
    own = [
        n for n, pair in enumerate(rows.tolist()) if pair in chunks.documents(2, 3)[:, 1:].tolist()
    ]
    assert own
    for chunk in own:
        for row in range(4):
            wrong = allowed.copy()
            wrong[row, 2] = chunk
            with pytest.raises(
                DataError, match=f"neighbour {chunk} of chunk {START + row} is of a"
            ):
                check(yard, wrong)


def test_an_excluded_chunk_is_refused(yard: Yard, allowed: NDArray[np.int64]) -> None:
    excluded = np.zeros(len(yard.database()), np.bool_)
    excluded[allowed[1, 0]] = True
    with pytest.raises(DataError, match="repeats an evaluation set"):
        check(yard, allowed, excluded)
