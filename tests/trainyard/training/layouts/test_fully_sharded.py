"""Gradients and weights sharded over data-parallel ranks, and optimizers in several instances: five
steps come to what one process comes to."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process, assert_same_bits
from tests.trainyard.training.layouts.runs import run_of
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ZERO2, ZERO3 = "optim_grads", "optim_grads_params"

CUTS = [
    Cut(dp=2, reduction=ZERO3),
    Cut(dp=4, reduction=ZERO3, bf16=True, kind="llama", recompute="full"),
    Cut(dp=2, reduction=ZERO2, tied=False, recompute="selective", padded=True),
    Cut(dp=4, reduction=ZERO2, bf16=True, recompute="block"),
    Cut(dp=2, tensor="tp2 sp", reduction=ZERO3, kind="llama", padded=True),
    Cut(dp=2, tensor="tp2 sp overlap", context="p2p", reduction=ZERO3, bf16=True),
    Cut(context="allgather", reduction=ZERO2, per_token=True),
    Cut(dp=4, instances=2, reduction=ZERO3),
    Cut(dp=4, instances=2, reduction=ZERO2, bf16=True, tied=False),
    Cut(dp=4, instances=2, reduction="zero"),
    Cut(dp=2, instances=2, reduction=ZERO3),  # each rank alone has all
    Cut(dp=4, instances=2, tensor="tp2 sp", reduction="zero overlap", bf16=True),
    Cut(dp=2, instances=2, pp=2, reduction="zero", context="p2p"),
    Cut(kind="mixtral", num_layers=2, dp=2, reduction=ZERO3),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=2, reduction=ZERO3),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=4, reduction=ZERO2, recompute="full"),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=2, instances=2, reduction="zero"),
    Cut(kind="mixtral", num_layers=2, dp=4, ep=2, instances=2, reduction=ZERO3),
    Cut(kind="gpt moe", num_layers=2, tensor="tp2 sp", dp=2, ep=2, reduction=ZERO3),
    Cut(kind="bert", dp=4, reduction=ZERO3),  # more ranks than the order of sentences has rows
    Cut(kind="t5", dp=2, reduction=ZERO3, recompute="full"),
    Cut(kind="retro", dp=2, reduction=ZERO3),
    Cut(kind="predicting", num_layers=2, dp=2, reduction=ZERO3, tied=False, recompute="full"),
    Cut(kind="predicting deepseek", num_layers=2, dp=2, ep=2, reduction=ZERO3),
    Cut(kind="hybrid moe", dp=2, ep=2, reduction=ZERO3),
    Cut(kind="gpt-oss", num_layers=2, dp=2, reduction=ZERO3),
]


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_way_of_sharding_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)


def test_what_is_kept_after_forward_changes_no_bit(ranks: RankPool) -> None:
    expected = run_of(Cut(dp=2, reduction=ZERO3, bf16=True), ranks, 3)
    for recompute in ("none", "full"):
        cut = Cut(dp=2, reduction=ZERO2, bf16=True, recompute=recompute)
        assert_same_bits(run_of(cut, ranks, 3), expected)
