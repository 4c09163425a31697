"""Mamba-2 and hybrids, cut over ranks: five steps come to what one process comes to. Of four layers
a hybrid has two of Mamba-2, one of attention, one MLP."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="mamba", tensor="tp4 sp overlap", num_layers=2, padded=True),
    Cut(kind="hybrid", tensor="tp2 sp", recompute="selective"),
    Cut(kind="hybrid", pp=2, chunks=2, recompute="full"),
    Cut(kind="hybrid", dp=2, reduction="zero overlap", recompute="block"),
    Cut(kind="hybrid", tensor="tp2 sp", packed=True),
    Cut(kind="hybrid", tensor="tp2 sp", pp=2, dp=2, reduction="zero", padded=True),
    Cut(kind="hybrid", tensor="tp2 sp", pp=2, tied=False, bf16=True),
    Cut(kind="hybrid moe", tensor="tp2 sp", dp=2, ep=2),
]


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_hybrid_over_ranks_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
