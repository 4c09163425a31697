"""What a step does not depend on: the order of its micro-batches, and where dropout is drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import distance
from tests.trainyard.training.layouts.runs import reference, run_of
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_LAYOUT

pytestmark = pytest.mark.slow

# Weighed by token, as micro-batches have different numbers; dropout follows the place in the step.
BASE = Cut(hidden_dropout=0.0, per_token=True)
PERMUTED = (5, 2, 7, 0, 1, 6, 3, 4)


def test_the_order_of_micro_batches_does_not_matter() -> None:
    found = run_of(replace(BASE, order=PERMUTED))
    assert not distance(found, reference(BASE)).exceeds(FP32_LAYOUT)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cut",
    [
        replace(BASE, dp=2, reduction="zero overlap"),
        replace(BASE, pp=2, chunks=2),
        pytest.param(replace(BASE, tensor="tp2 sp", dp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_assignment_of_micro_batches_to_ranks_does_not_matter(
    cut: Cut, ranks: RankPool
) -> None:
    found = run_of(replace(cut, order=PERMUTED), ranks)
    assert not distance(found, reference(BASE)).exceeds(FP32_LAYOUT)


def test_the_mean_of_means_differs_from_the_per_token_loss() -> None:
    """Micro-batches do have different numbers of tokens, or the tests above would show little."""
    means = reference(replace(BASE, per_token=False))
    assert distance(means, reference(BASE)).gradient > 1e-3


def test_dropout_changes_the_loss_of_these_runs() -> None:
    """... so that their equality says that dropout is the same at any cut."""
    dropped, kept = reference(Cut()), reference(Cut(hidden_dropout=0.0))
    assert abs(dropped.losses[0] - kept.losses[0]) > 1e-3
    assert Cut().model.hidden_dropout > 0


def test_gradient_clipping_changes_these_runs() -> None:
    assert min(reference(Cut()).norms) > Cut().clip_grad > 0
