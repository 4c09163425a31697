"""Cuts that add nothing up in another order give the same bits, and those that do the same step.

More than two ranks that add gradients up (data x context) do so in an order that depends on the
place in a bucket; there, buckets must be alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_same_bits
from tests.trainyard.training.layouts.runs import reference, run_of
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_LAYOUT

pytestmark = pytest.mark.slow

STEPS = 3


def quick(choices: Iterable[str], *chosen: str) -> list[Any]:
    """All are parameters of a test; those not chosen are slow."""
    return [pytest.param(c, marks=() if c in chosen else pytest.mark.slow) for c in choices]


# A tied embedding's gradient has two summands a micro-batch on one stage, and two sums on two.
ALONE = Cut(tied=False)
STAGES = {
    "two": replace(ALONE, pp=2),
    "two, recomputed": replace(ALONE, pp=2, recompute="full"),
    "two with two chunks": replace(ALONE, pp=2, chunks=2),
    "first uneven": replace(ALONE, pp=2, pipeline=(("decoder_first_pipeline_num_layers", 1),)),
    "last uneven": replace(ALONE, pp=2, pipeline=(("decoder_last_pipeline_num_layers", 3),)),
    "four": replace(ALONE, pp=4),
    "embedding and loss count": replace(
        ALONE,
        pp=3,
        pipeline=(
            ("account_for_embedding_in_pipeline_split", True),
            ("account_for_loss_in_pipeline_split", True),
        ),
    ),
    "spelt out": replace(ALONE, pp=4, pipeline=(("pipeline_model_parallel_layout", "E|tt|t*2|L"),)),
    "a rank without a layer": replace(
        ALONE, pp=4, pipeline=(("pipeline_model_parallel_layout", "Ett||tt|L"),)
    ),
    "chunks spelt out, one empty": replace(
        ALONE, pp=2, pipeline=(("pipeline_model_parallel_layout", "Et||ttt|L"),)
    ),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stages", quick(STAGES, "chunks spelt out, one empty"))
def test_pipeline_stages_equal_one_process_bit_for_bit(stages: str, ranks: RankPool) -> None:
    check_stages(STAGES[stages], ranks)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_without_a_layer_needs_no_rotary_embedding(ranks: RankPool) -> None:
    check_stages(replace(STAGES["a rank without a layer"], kind="llama"), ranks)


def check_stages(cut: Cut, ranks: RankPool) -> None:
    found, expected = run_of(cut, ranks, STEPS), reference(replace(ALONE, kind=cut.kind), STEPS)
    assert found.norms == pytest.approx(expected.norms, rel=FP32_LAYOUT.grad_norm)
    found.norms[:] = expected.norms
    assert_same_bits(found, expected)


@pytest.mark.parametrize("recompute", ["selective", "full", "block"])
@pytest.mark.parametrize("kind", quick(("gpt", "llama"), "gpt"))
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recomputation_changes_no_bit(recompute: str, kind: str, bf16: bool) -> None:
    cut = Cut(kind=kind, bf16=bf16)
    found = run_of(replace(cut, recompute=recompute), num_steps=STEPS)  # type: ignore[arg-type]
    assert_same_bits(found, reference(cut, STEPS))


FAMILIES = {
    "data": [
        Cut(dp=2),
        Cut(dp=2, reduction="overlap"),
        Cut(dp=2, reduction="zero overlap"),
    ],
    "buckets": [
        Cut(dp=2),
        Cut(dp=2, reduction="overlap", bucket_size=1),
        Cut(dp=2, reduction="zero overlap", bucket_size=1),
        Cut(dp=2, reduction="zero", bucket_size=20_000),
    ],
    "data and context, 16 bits": [
        Cut(dp=2, context="p2p", bf16=True, reduction=reduction, recompute=recompute)
        for reduction in ("plain", "zero")
        for recompute in ("none", "full")
    ],
    "tensor and context": [
        Cut(tensor="tp2 sp", context="allgather"),
        Cut(tensor="tp2 sp", context="allgather", reduction="zero overlap"),
        Cut(tensor="tp2 sp", context="allgather", recompute="selective"),
    ],
    "tensor, data and stages": [
        Cut(tensor="tp2 sp", dp=2, tied=False),
        Cut(tensor="tp2 sp", dp=2, tied=False, pp=2),
        Cut(tensor="tp2 sp", dp=2, tied=False, pp=2, chunks=2, reduction="zero overlap"),
        Cut(tensor="tp2 sp", dp=2, tied=False, pp=2, recompute="full", reduction="overlap"),
    ],
    "tied stages": [Cut(pp=2), Cut(pp=4), Cut(pp=2, chunks=2, recompute="block")],
    "four data-parallel ranks": [
        Cut(dp=4),
        Cut(dp=4, reduction="zero"),
        Cut(dp=4, recompute="full"),
    ],
    "context and stages": [
        Cut(context="a2a", kind="llama", tied=False),
        Cut(context="a2a", kind="llama", tied=False, pp=2, reduction="zero overlap"),
    ],
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("family", quick(FAMILIES, "data"))
def test_the_way_of_reducing_gradients_changes_no_bit(family: str, ranks: RankPool) -> None:
    first, *others = FAMILIES[family]
    expected = run_of(first, ranks, STEPS)
    for cut in others:
        assert_same_bits(run_of(cut, ranks, STEPS), expected)


ORDERS = [
    "tp-cp-ep-pp-dp",
    "dp-tp-pp-cp-ep",
    "pp-dp-cp-ep-tp",
    "cp-pp-dp-tp-ep",
]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [Cut(tensor="tp2 sp", pp=2, dp=2, reduction="zero"), Cut(tensor="tp2", context="p2p", pp=2)],
    ids=str,
)
def test_the_rank_order_changes_no_bit(cut: Cut, ranks: RankPool) -> None:
    expected = run_of(cut, ranks, 2)
    for order in ORDERS:
        assert_same_bits(run_of(replace(cut, rank_order=order), ranks, 2), expected)
