"""A BERT with padding and both losses, cut over ranks: each equals one process."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from tests.trainyard.training.layouts.runs import NUM_STEPS
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(kind="bert", tensor="tp2"),
    Cut(kind="bert", tensor="tp2 sp", recompute="selective"),
    Cut(kind="bert", tensor="tp2 sp overlap", padded=True),
    Cut(kind="bert", pp=2, num_layers=2, recompute="full"),
    Cut(kind="bert", pp=2, chunks=2),
    Cut(kind="bert", dp=2, reduction="zero overlap"),
    Cut(kind="bert", tensor="tp2 sp", pp=2, dp=2, reduction="zero", num_layers=2, padded=True),
    Cut(kind="bert", tensor="tp2 sp", pp=2, tied=False, num_layers=2, bf16=True),
]


@pytest.mark.recorded
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_bert_over_ranks_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    # In bf16, the gradients of `binary_head.bias`, two numbers, cancel over more steps to rounding
    # errors.
    assert_equals_one_process(cut, ranks, 2 if cut.bf16 else NUM_STEPS)
