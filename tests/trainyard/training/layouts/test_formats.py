"""Every family in every number format: losses and gradients are those in fp32, but for rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.records import recorded
from tests.trainyard.training.layouts.cases import MICRO_BATCH_SIZE
from tests.trainyard.training.layouts.formats import (
    FORMATS,
    IN_8_BITS,
    KIND_OF,
    LAYOUTS,
    PAGE,
    InFormat,
    case_alone,
    cases_over_ranks,
    in_layout,
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
LOSS_OF_A_SECOND_STEP = 0.1
"""With 8 bits: the z-loss of a router is then 5 to 7 % off with every recipe."""
GRADIENT = {"bf16": (1e-4, 0.05), "fp16": (1e-5, 0.02)}
GRADIENT_OF_8_BITS = (0.05, 0.4)
"""At least, at most; one with 8 bits is further off than any with 16."""


WRITE = "python -m tests.trainyard.training.layouts.formats"


@cache
def run(cut: InFormat) -> Run:
    return run_of(cut, num_steps=steps_of(cut.number_format))


def steps_of(name: str | None) -> int:
    return NUM_STEPS if name in (None, "FP8 delayed") else 1


def of_8_bits(name: str | None) -> float:
    """How far losses may be from those in fp32."""
    return LOSS_OF_8_BITS if steps_of(name) == 1 else LOSS_OF_A_SECOND_STEP


def distance(found: Run, right: Run) -> float:
    """Of all gradients of the first step together."""
    pairs = [(found.gradients[name].float(), t.float()) for name, t in right.gradients.items()]
    apart = sum(float((ours - t).square().sum()) for ours, t in pairs)
    return (apart / sum(float(t.square().sum()) for _, t in pairs)) ** 0.5


@pytest.mark.recorded
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_family_trains_in_a_format_as_in_fp32(family: str, name: str) -> None:
    cut = InFormat(kind=KIND_OF[family], hidden_dropout=0.0, number_format=name)
    check_fp8(cut.model, cut.precision, ParallelConfig(), MICRO_BATCH_SIZE)
    right, found = run(replace(cut, number_format=None)), run(cut)
    losses = right.losses[: len(found.losses)]
    assert found.losses == pytest.approx(losses, rel=LOSS.get(name, of_8_bits(name)))
    least, most = GRADIENT.get(name, GRADIENT_OF_8_BITS)
    assert least < distance(found, right) < most


FEW = {"GPT", "GPT, experts", "BERT", "Mamba-2, hybrids"}
"""Families of which some cases over ranks are not `full`."""


def over_ranks(family: str, name: str, layout: str) -> Any:
    """A case; of each of a few families four are not `full`, another recipe in each layout."""
    turn = (IN_8_BITS.index(name) + list(LAYOUTS).index(layout)) % len(IN_8_BITS)
    few = family in FEW and turn == sorted(FEW).index(family)
    return pytest.param(
        *(family, name, layout),
        marks=() if few else pytest.mark.full,
        id=f"{family}-{name}-{layout}",
    )


@pytest.mark.distributed
@pytest.mark.recorded
@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [over_ranks(*case) for case in product(KIND_OF, IN_8_BITS, LAYOUTS)],
)
def test_a_family_trains_in_8_bits_over_ranks(
    family: str, name: str, layout: str, ranks: RankPool
) -> None:
    """Ranks see other parts of tensors, so one process has other scales: both are as near."""
    cut = in_layout(family, name, layout)
    check_fp8(cut.model, cut.precision, cut.parallel, MICRO_BATCH_SIZE)
    assert_as_near_as_one_process(cut, ranks)


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
    cut = InFormat(kind="mixtral", hidden_dropout=0.0, number_format=name, **layout)
    assert_as_near_as_one_process(cut, ranks)


def assert_as_near_as_one_process(cut: InFormat, ranks: RankPool) -> None:
    """Losses are those in fp32, and gradients as far from those as on one process."""
    alone = replace(cut.alone(), recompute="none")
    right, one = run(replace(alone, number_format=None)), run(alone)
    found = run_of(cut, ranks, num_steps=steps_of(cut.number_format))
    losses = right.losses[: len(found.losses)]
    assert found.losses == pytest.approx(losses, rel=of_8_bits(cut.number_format))
    least, most = GRADIENT_OF_8_BITS
    assert least < distance(found, right) < most
    assert distance(found, right) == pytest.approx(distance(one, right), rel=0.25)


def test_the_page_has_these_tables_for_all_families() -> None:
    page = PAGE.read_text()
    assert page == written(page, recorded()), f"{WRITE} --write"
    assert KIND_OF.keys() == FAMILIES.keys()


def test_every_case_was_recorded() -> None:
    over = [case for f in KIND_OF for layout in LAYOUTS for _, case in cases_over_ranks(f, layout)]
    for test, case in [*(case_alone(*case) for case in CASES), *over]:
        assert case in recorded()[test]
