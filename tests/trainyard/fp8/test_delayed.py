"""Delayed scaling: scales come from the maxima of past steps, the same however a layer is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.fp8.cast import FORWARD, WIDE
from trainyard.fp8.delayed import DelayedScaling, advance_all
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import shard_of
from trainyard.parallel.tensor.fp8_linear import fp8_linear
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainyard.testing.pool import RankPool

S, B, IN, OUT = 16, 2, 32, 64
RECIPE = Fp8Recipe("hybrid", "delayed", history_length=3, amax_compute_algo="max")
CPU = torch.device("cpu")
LIMITS = [torch.finfo(dtype).max for dtype in (FORWARD, FORWARD, WIDE)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_largest_of_the_kept_maxima_scales_the_next_step() -> None:
    scaling = DelayedScaling(RECIPE, CPU)
    steps = [(4.0, 2.0, 1.0), (8.0, 1.0, 1.0), (1.0, 1.0, 0.0), (2.0, 4.0, 0.0), (1.0, 1.0, 0.0)]
    assert scaling.scales.tolist() == [0, 0, 0]  # none
    for step, found in enumerate(steps):
        scaling.advance(torch.tensor(found))
        kept = torch.tensor(steps[max(0, step - 2) : step + 1]).amax(0)
        assert torch.equal(scaling.scales[:2], torch.tensor(LIMITS[:2]) / kept[:2])
    assert scaling.scales[2] == LIMITS[2]  # no gradient for three steps: it stays
    assert scaling.state[:, 1:].t().tolist() == [list(step) for step in reversed(steps[2:])]
    before = scaling.scales.clone()
    scaling.advance(torch.tensor([torch.inf, torch.nan, 2.0]))
    assert torch.equal(scaling.scales[:2], before[:2])


def test_the_last_maximum_and_a_margin() -> None:
    recent = DelayedScaling(replace(RECIPE, amax_compute_algo="most_recent", margin=2), CPU)
    for top in (8.0, 2.0):
        recent.advance(torch.full((3,), top))
    assert recent.scales.tolist() == [limit / 2.0 / 4.0 for limit in LIMITS]


def test_maxima_are_over_the_micro_batches_and_not_of_evaluations() -> None:
    scaling = DelayedScaling(RECIPE, CPU)
    weight = draw(OUT, IN, seed=1).requires_grad_()
    inputs, grads = (
        [draw(S, B, IN, seed=k) for k in (2, 3)],
        [draw(S, B, OUT, seed=k) for k in (4, 5)],
    )
    with torch.no_grad():
        fp8_linear(inputs[0] * 100, weight, None, RECIPE, scaling)
    for x, grad in zip(inputs, grads, strict=True):
        fp8_linear(x, weight, None, RECIPE, scaling).backward(grad)
    tops = [max(float(t.abs().max()) for t in some) for some in (inputs, [weight.detach()], grads)]
    assert scaling.largest.tolist() == tops
    assert scaling.probe.grad is None
    advance_all([scaling], None)
    assert torch.equal(scaling.scales, torch.tensor(LIMITS) / torch.tensor(tops))
    assert scaling.largest.tolist() == [0, 0, 0]


def test_with_the_maxima_of_its_own_tensors_it_is_tensorwise_scaling() -> None:
    found = []
    for recipe in (Fp8Recipe("hybrid"), RECIPE):
        scaling = DelayedScaling(recipe, CPU) if recipe.scaling == "delayed" else None
        for _ in range(2):  # the second has the scales of the first, which saw the same
            x, weight = (
                draw(S, B, IN, seed=2).requires_grad_(),
                draw(OUT, IN, seed=1).requires_grad_(),
            )
            y = fp8_linear(x, weight, None, recipe, scaling)
            y.backward(draw(S, B, OUT, seed=3))
            advance_all([scaling] if scaling else [], None)
        found.append((y, x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_a_tensor_without_a_past_is_scaled_by_itself_and_no_other() -> None:
    """Gradients as small as those of a first step are not lost; then the past counts."""
    x, weight, grad = draw(S, B, IN, seed=2), draw(OUT, IN, seed=1), draw(S, B, OUT, seed=3) / 2**20

    def results(recipe: Fp8Recipe, scaling: DelayedScaling | None) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = fp8_linear(leaves[0], leaves[1], None, recipe, scaling)
        y.backward(grad)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    right = results(Fp8Recipe("hybrid"), None)
    scaling = DelayedScaling(RECIPE, CPU)
    for _ in range(2):  # two micro-batches of the first step
        assert all(map(torch.equal, results(RECIPE, scaling), right))
    assert all(found.any() for found in right)
    scaling.advance(torch.tensor([1.0, 1.0, 0.0]))  # the gradient was zero: it has no past yet
    assert scaling.scales.tolist() == [LIMITS[0], LIMITS[1], 0.0]
    found = results(RECIPE, scaling)
    assert not torch.equal(found[0], right[0])  # inputs above 1 are cut off
    assert found[1].any()
    scaling.state[2, 0] = 1.0
    assert not results(RECIPE, scaling)[1].any()


def states(kind: type[Any], cut: dict[str, bool]) -> Tensor:
    """After two steps of a layer cut over the ranks."""
    parallel = ModelParallel(tp=dist.group.WORLD, **cut)
    layer = kind(IN, OUT, bias=False, parallel=parallel).bfloat16()
    layer.fp8, layer.delayed = RECIPE, DelayedScaling(RECIPE, CPU)
    shard = shard_of(layer.weight)
    assert shard is not None
    layer.weight.data.copy_(shard.take(draw(OUT, IN, seed=1)))
    rank, size = parallel.tp_rank, parallel.tp_size
    is_column = kind is ColumnParallelLinear
    for step in range(2):
        x, grad = draw(S, B, IN, seed=step + 2), draw(S, B, OUT, seed=step + 4)
        if is_column:
            x = x.chunk(size, 0)[rank] if parallel.sequence_parallel else x
            grad = grad.chunk(size, 2)[rank]
        else:
            x = x.chunk(size, 2)[rank]
            grad = grad.chunk(size, 0)[rank] if parallel.sequence_parallel else grad
        layer(x.clone().requires_grad_()).backward(grad.contiguous())
        advance_all([layer.delayed], dist.group.WORLD)
    state: Tensor = layer.delayed.state
    return state


@pytest.mark.few_cases(1)
@pytest.mark.distributed
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("cut", [{}, {"sequence_parallel": True}], ids=["tp", "sp"])
def test_a_cut_layer_has_the_scales_of_one_rank(
    ranks: RankPool, kind: type[Any], cut: dict[str, bool]
) -> None:
    alone = DelayedScaling(RECIPE, CPU)
    weight = draw(OUT, IN, seed=1).requires_grad_()
    for step in range(2):
        y = fp8_linear(draw(S, B, IN, seed=step + 2), weight, None, RECIPE, alone)
        y.backward(draw(S, B, OUT, seed=step + 4))
        advance_all([alone], None)
    for state in ranks.run(states, 2, kind, cut):
        assert torch.equal(state, alone.state)
