"""Multi-latent attention spread over ranks: five steps come to what one process comes to."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="latent", num_layers=2, tensor="tp2"),
    Cut(kind="latent", num_layers=2, tensor="tp4 sp", reduction="plain", recompute="selective"),
    Cut(kind="latent", num_layers=2, tensor="tp2 sp overlap", dp=2, reduction="zero overlap"),
    Cut(kind="latent", num_layers=4, pp=2, chunks=2, dp=2, recompute="full", bf16=True),
    Cut(kind="latent", num_layers=2, context="p2p", tensor="tp2 sp"),
    Cut(kind="latent", num_layers=2, context="allgather", tensor="tp2", recompute="full"),
    Cut(kind="latent", num_layers=2, context="a2a", dp=2, reduction="zero"),
    Cut(kind="latent queries of tokens", num_layers=2, tensor="tp2 sp", pp=2),
    Cut(kind="latent queries of tokens", num_layers=2, context="p2p", recompute="selective"),
    Cut(kind="deepseek v3", num_layers=2, tensor="tp2 sp", dp=2, ep=2),
    Cut(kind="deepseek v3", num_layers=4, pp=2, dp=2, ep=2, reduction="zero"),
]


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_latents_over_ranks_equal_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
