"""Mixtures of experts spread over ranks: five steps come to what one process comes to."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="mixtral", num_layers=2, dp=2, ep=2),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=4, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=2, reduction="zero overlap", recompute="full"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", dp=2, ep=2, recompute="selective"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", dp=2, ep=4, etp=1, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", dp=2, ep=2, etp=2, pp=2, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, tensor="tp2 sp", etp=1),
    Cut(kind="mixtral", num_layers=2, context="allgather", ep=2),
    Cut(kind="mixtral", num_layers=4, pp=2, chunks=2, dp=2, ep=2, bf16=True),
    Cut(kind="mixtral", num_layers=2, dp=2, ep=2, per_token=True),
    Cut(kind="deepseek moe", num_layers=2, dp=2, ep=2),
    Cut(kind="deepseek moe", num_layers=2, tensor="tp2 sp", context="p2p", ep=4, etp=1),
    Cut(kind="deepseek moe", num_layers=4, pp=2, dp=2, ep=2, reduction="zero", recompute="block"),
    Cut(
        kind="deepseek moe", num_layers=2, tensor="tp2 sp", dp=2, ep=2, rank_order="ep-dp-tp-cp-pp"
    ),
    Cut(kind="gpt moe", num_layers=2, dp=2),
    Cut(kind="gpt moe", num_layers=2, dp=4, ep=2, reduction="overlap", recompute="full"),
    Cut(kind="gpt moe", num_layers=2, tensor="tp2 sp", dp=2, ep=2),
    Cut(kind="gpt moe", num_layers=2, tensor="tp2 sp", dp=2, ep=1, etp=4, reduction="zero"),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_experts_over_ranks_equal_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
