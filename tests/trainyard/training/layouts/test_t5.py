"""A T5 with padding in encoder and decoder, cut over ranks: five steps come to what one process
comes to."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="t5", tensor="tp2", num_layers=2),
    Cut(kind="t5", tensor="tp2 sp", recompute="selective", num_layers=2),
    Cut(kind="t5", tensor="tp2 sp overlap", padded=True, num_layers=2),
    Cut(kind="t5", pp=2, num_layers=2, recompute="full"),
    Cut(kind="t5", pp=2, chunks=2, num_layers=2, recompute="block"),
    Cut(kind="t5", dp=2, reduction="zero overlap", num_layers=2),
    Cut(kind="t5", tensor="tp2 sp", pp=2, dp=2, reduction="zero", num_layers=2, padded=True),
    Cut(kind="t5", tensor="tp2 sp", pp=2, tied=False, num_layers=4, bf16=True),
    Cut(kind="google t5", tensor="tp2", num_layers=2, recompute="selective"),
    Cut(kind="google t5", tensor="tp2 sp", dp=2, reduction="zero", num_layers=2),
    Cut(kind="google t5", dp=2, num_layers=2, recompute="full", tied=False),
]


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_t5_over_ranks_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
