"""Packed conversations, cut over ranks: five steps come to what one process comes to. The bounds of
conversations lie within the pieces of context-parallel ranks and across them, and stages in the
middle of a pipeline need them too."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(packed=True, tensor="tp2 sp", padded=True),
    Cut(packed=True, context="allgather", kind="llama"),
    Cut(packed=True, context="a2a", tensor="tp2"),
    Cut(packed=True, pp=2, dp=2, reduction="zero overlap", per_token=True),
    Cut(packed=True, pp=2, chunks=2, recompute="full", kind="llama"),
    Cut(packed=True, context="allgather", tensor="tp2 sp", pp=2, tied=False, bf16=True),
    Cut(packed=True, kind="retro", tensor="tp2 sp", pp=2, dp=2, reduction="zero overlap"),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_packed_conversations_over_ranks_equal_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
