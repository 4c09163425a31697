"""A Retro with neighbours of all lengths, cut over ranks: five steps come to what one process comes
to. The encoder is on another stage than the embedding, and than other layers with cross
attention."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="retro", tensor="tp2"),
    Cut(kind="retro", tensor="tp2 sp", recompute="selective"),
    Cut(kind="retro", tensor="tp4 sp overlap", padded=True),
    Cut(kind="retro", pp=2, recompute="full"),
    Cut(kind="retro", pp=2, chunks=2),
    Cut(kind="retro", dp=2, reduction="zero overlap", recompute="block"),
    Cut(kind="retro", tensor="tp2 sp", pp=2, dp=2, reduction="zero", num_layers=2, padded=True),
    Cut(kind="retro", tensor="tp2 sp", pp=2, tied=False, num_layers=2, bf16=True),
]


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_retro_over_ranks_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
