"""Muon over ranks: five steps come to what one process comes to."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

CUTS = [
    Cut(rule="muon", num_layers=2, kind="llama", tensor="tp2 sp", dp=2, reduction="zero overlap"),
    Cut(rule="muon", num_layers=2, kind="llama", tensor="tp4", tp_mode="distributed"),
    Cut(rule="muon", num_layers=2, dp=4, reduction="zero", tied=False),
    Cut(rule="muon", num_layers=2, pp=2, dp=2, reduction="plain", tp_mode="distributed"),
    Cut(rule="muon", num_layers=2, kind="t5", tensor="tp2", dp=2, reduction="zero"),
    Cut(rule="muon", num_layers=2, kind="mixtral", dp=2, ep=2, reduction="zero"),
    Cut(
        **{"rule": "muon", "num_layers": 2, "kind": "mixtral", "tensor": "tp2 sp", "dp": 2},
        **{"ep": 2, "etp": 2, "reduction": "zero", "tp_mode": "distributed"},
    ),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_muon_over_ranks_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)
