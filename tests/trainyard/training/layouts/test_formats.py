"""Every family in every number format: losses and gradients are those in fp32, but for rounding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.trainyard.training.layouts.cases import MICRO_BATCH_SIZE
from tests.trainyard.training.layouts.formats import (
    FORMATS,
    KIND_OF,
    PAGE,
    InFormat,
    written,
)
from tests.trainyard.training.layouts.matrix import FAMILIES
from tests.trainyard.training.layouts.runs import Run, run_of
from trainyard.parallel.config import ParallelConfig
from trainyard.testing.pool import RankPool
from trainyard.training.options.fp8_checks import check_fp8

pytestmark = pytest.mark.slow

CASES = [(family, name) for family in KIND_OF for name in FORMATS]
NUM_STEPS = 2
"""With scales of past steps; otherwise one step."""
LOSS = {"bf16": 0.02, "fp16": 0.005}
LOSS_OF_8_BITS = 0.05
GRADIENT = {"bf16": (1e-4, 0.05), "fp16": (1e-5, 0.02)}
GRADIENT_OF_8_BITS = (0.05, 0.4)
"""At least, at most; one with 8 bits is further off than any with 16."""


@cache
def run(kind: str, name: str | None) -> Run:
    cut = InFormat(kind=kind, hidden_dropout=0.0, number_format=name)
    return run_of(cut, num_steps=steps_of(name))


def steps_of(name: str | None) -> int:
    return NUM_STEPS if name in (None, "FP8 delayed") else 1


def distance(found: Run, right: Run) -> float:
    """Of all gradients of the first step together."""
    pairs = [(found.gradients[name].float(), t.float()) for name, t in right.gradients.items()]
    apart = sum(float((ours - t).square().sum()) for ours, t in pairs)
    return (apart / sum(float(t.square().sum()) for _, t in pairs)) ** 0.5


@pytest.mark.recorded
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_family_trains_in_a_format_as_in_fp32(family: str, name: str) -> None:
    cut = InFormat(kind=KIND_OF[family], number_format=name)
    check_fp8(cut.model, cut.precision, ParallelConfig(), MICRO_BATCH_SIZE)
    right, found = run(KIND_OF[family], None), run(KIND_OF[family], name)
    losses = right.losses[: len(found.losses)]
    assert found.losses == pytest.approx(losses, rel=LOSS.get(name, LOSS_OF_8_BITS))
    least, most = GRADIENT.get(name, GRADIENT_OF_8_BITS)
    assert least < distance(found, right) < most


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("FP8 tensorwise", {"dp": 2, "ep": 2, "reduction": "zero"}),
        ("FP8 delayed", {"dp": 2, "ep": 4, "etp": 1, "tensor": "tp2 sp"}),
        ("FP8 rowwise", {"dp": 2, "ep": 2, "etp": 2, "tensor": "tp2 sp", "recompute": "full"}),
        ("FP8 blockwise", {"dp": 2, "ep": 2, "reduction": "optim_grads_params"}),
    ],
)
def test_experts_over_ranks_train_in_8_bits_as_in_fp32(
    name: str, layout: dict[str, Any], ranks: RankPool
) -> None:
    """Ranks bring other rows together, so one process has other scales: both are as near."""
    cut = InFormat(kind="mixtral", hidden_dropout=0.0, number_format=name, **layout)
    right, one = run("mixtral", None), run("mixtral", name)
    found = run_of(cut, ranks, num_steps=steps_of(name))
    losses = right.losses[: len(one.losses)]
    assert found.losses == pytest.approx(losses, rel=LOSS_OF_8_BITS)
    least, most = GRADIENT_OF_8_BITS
    assert least < distance(found, right) < most
    assert distance(found, right) == pytest.approx(distance(one, right), rel=0.25)


def test_the_page_has_this_table_for_all_families() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.trainyard.training.layouts.formats --write"
    assert KIND_OF.keys() == FAMILIES.keys()
