"""Multi-token prediction spread over ranks: five steps come to what one process comes to."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="predicting", num_layers=2, tensor="tp2", padded=True),
    Cut(kind="predicting", num_layers=2, tensor="tp2 sp", dp=2, reduction="zero overlap"),
    Cut(kind="predicting", num_layers=2, pp=2, dp=2, tied=False, reduction="zero"),
    Cut(kind="predicting", num_layers=2, pp=2, tensor="tp2 sp", recompute="full"),
    Cut(kind="predicting", num_layers=4, pp=2, chunks=2, tied=False, bf16=True),
    Cut(kind="predicting", num_layers=2, context="p2p", per_token=True),
    Cut(kind="predicting", num_layers=2, context="allgather", tied=False, recompute="selective"),
    Cut(kind="predicting", num_layers=2, dp=2, per_token=True),
    Cut(kind="predicting deepseek", num_layers=2, tensor="tp2 sp", dp=2, ep=2, tied=False),
    Cut(kind="predicting deepseek", num_layers=2, pp=2, dp=2, ep=2, reduction="zero"),
]


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_further_tokens_over_ranks_equal_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
