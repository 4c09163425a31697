"""Fifty steps of learning, cut in any way, follow the curve of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.runs import reference, run_of
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import LEARNING

STEPS = 50
CUTS = (
    Cut(dp=2),
    Cut(tensor="tp2"),
    Cut(pp=2),
    Cut(context="p2p"),
    Cut(tensor="tp2 sp", dp=2, reduction="zero overlap"),
    Cut(dp=4, reduction="optim_grads_params", instances=2),
)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_fifty_steps_follow_the_curve_of_one_process(cut: Cut, ranks: RankPool) -> None:
    # Epsilon is that of real runs: the rounding of tiny gradients counts.
    cut = replace(cut, adam_eps=1e-8, num_layers=2)
    found, expected = run_of(cut, ranks, STEPS), reference(cut.alone(), STEPS)
    assert found.losses == pytest.approx(expected.losses, rel=LEARNING)
    assert expected.losses[-1] < 0.8 * expected.losses[0], "nothing was learnt"
