"""Which cuts are tried."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import (
    FACTORS,
    all_cuts,
    cut_of,
    degrees_of,
    pairwise_cuts,
    valid_rows,
)
from trainyard.testing.covering import combinations_of


@pytest.mark.slow
def test_the_selection_has_every_pair_and_no_more_than_it_needs() -> None:
    chosen = [tuple(getattr(cut, name) for name in FACTORS) for cut in pairwise_cuts()]
    assert combinations_of(chosen) == combinations_of(valid_rows())
    assert 30 <= len(chosen) <= 50


@pytest.mark.slow
def test_the_full_product_includes_recomputation_and_communication() -> None:
    possible, cuts = [cut_of(row) for row in valid_rows()], all_cuts()
    assert {(degrees_of(cut), cut.recompute) for cut in cuts} == {
        (degrees_of(cut), cut.recompute) for cut in possible
    }
    means = ("tensor", "context", "pp", "chunks", "dp", "reduction")
    assert {tuple(getattr(cut, name) for name in means) for cut in cuts} == {
        tuple(getattr(cut, name) for name in means) for cut in possible
    }
    assert 400 <= len(set(cuts)) == len(cuts) <= 600
