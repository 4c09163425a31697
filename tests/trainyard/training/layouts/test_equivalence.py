"""The same run, cut over ranks in every way, equals that of one process.

Five steps of every pair of choices in `make test-distributed`; in `make test-full`, three steps of
a third of all cuts, chosen by the commit."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut, all_cuts, pairwise_cuts
from tests.trainyard.training.layouts.compare import assert_equals_one_process
from trainyard.testing.pool import RankPool

# Choosing cuts takes seconds: a run without slow tests need not import this.
pytestmark = [pytest.mark.slow, pytest.mark.distributed]

FEW_STEPS = 3
"""The third step is the first that begins from weights and moments which an update with moments
made."""


@pytest.mark.parametrize("cut", pairwise_cuts(), ids=str)
def test_every_pair_of_options_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks)


@pytest.mark.full
@pytest.mark.recorded
@pytest.mark.parametrize("cut", all_cuts(), ids=str)
def test_every_layout_equals_one_process(cut: Cut, ranks: RankPool) -> None:
    assert_equals_one_process(cut, ranks, FEW_STEPS)
