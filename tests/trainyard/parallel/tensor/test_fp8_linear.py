"""Linear maps in 8 bits: their three products are those of the cast tensors, alone and cut over
ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.fp8.cast import FORWARD, WIDE, cast_pair
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import shard_of
from trainyard.parallel.tensor.fp8_linear import fp8_linear
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainyard.testing.pool import RankPool

S, B, IN, OUT = 16, 2, 32, 64
HYBRID, E4M3 = Fp8Recipe("hybrid"), Fp8Recipe("e4m3")
EIGHT_BITS, OF_GRADIENTS = 0.05, 0.1
"""Relative distance that two roundings to e4m3, and to e5m2, may make."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    pair = cast_pair(x.flatten(0, -2), dtype)
    return (pair.rows.double() * pair.inverse_scale.double()).view(x.shape)


def distance(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None
    assert b is not None
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize(("recipe", "grad_dtype"), [(HYBRID, WIDE), (E4M3, FORWARD)])
def test_the_three_products_are_those_of_the_cast_tensors(
    recipe: Fp8Recipe, grad_dtype: torch.dtype
) -> None:
    x, weight = draw(S, B, IN, seed=1).requires_grad_(), draw(OUT, IN, seed=2).requires_grad_()
    bias, grad = draw(OUT, seed=3).requires_grad_(), draw(S, B, OUT, seed=4)
    y = fp8_linear(x, weight, bias, recipe)
    y.backward(grad)
    x8, weight8 = rounded(x.detach(), FORWARD), rounded(weight.detach(), FORWARD)
    grad8 = rounded(grad, grad_dtype)
    bf16 = 2.0**-8
    assert distance(y, x8 @ weight8.t() + bias.detach()) < bf16
    assert distance(x.grad, grad8 @ weight8) < bf16
    assert distance(weight.grad, grad8.flatten(0, 1).t() @ x8.flatten(0, 1)) < bf16
    assert distance(bias.grad, grad.double().sum((0, 1))) < bf16


def test_what_is_kept_for_the_backward_pass_has_8_bits() -> None:
    x, weight = draw(S, B, IN, seed=1).requires_grad_(), draw(OUT, IN, seed=2).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fp8_linear(x, weight, None, HYBRID)
    assert {tensor.dtype for tensor in kept if tensor.ndim} == {FORWARD}


def check(kind: type[Any], cut: dict[str, bool]) -> None:
    """A layer cut over the ranks against one rank's, within the rounding of 8 bits."""
    parallel = ModelParallel(tp=dist.group.WORLD, **cut)
    layer = kind(IN, OUT, bias=False, parallel=parallel).bfloat16()
    layer.fp8 = HYBRID
    weight = draw(OUT, IN, seed=1)
    shard = shard_of(layer.weight)
    assert shard is not None
    layer.weight.data.copy_(shard.take(weight))
    weight.requires_grad_()
    x, grad = draw(S, B, IN, seed=3).requires_grad_(), draw(S, B, OUT, seed=4)
    expected = fp8_linear(x, weight, None, HYBRID)
    expected.backward(grad)

    def part(whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(parallel.tp_size, dim)[parallel.tp_rank]

    is_column = kind is ColumnParallelLinear
    mine, theirs_y, theirs_grad = x.detach(), expected.detach(), grad
    if is_column:
        mine = part(mine, 0) if parallel.sequence_parallel else mine
        theirs_y, theirs_grad = part(theirs_y, 2), part(theirs_grad, 2)
    else:
        mine = part(mine, 2)
        if parallel.sequence_parallel:
            theirs_y, theirs_grad = part(theirs_y, 0), part(theirs_grad, 0)
    mine = mine.clone().requires_grad_()
    y = layer(mine)
    y.backward(theirs_grad.contiguous())
    assert distance(y, theirs_y) < EIGHT_BITS
    assert x.grad is not None
    whole = x.grad
    if not is_column:
        whole = part(whole, 2)
    elif parallel.sequence_parallel:
        whole = part(whole, 0)
    assert distance(mine.grad, whole) < OF_GRADIENTS
    assert weight.grad is not None
    assert distance(layer.weight.grad, shard.take(weight.grad)) < OF_GRADIENTS


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("cut", [{}, {"sequence_parallel": True}])
def test_a_cut_layer_is_one_ranks_within_8_bits(
    ranks: RankPool, kind: type[Any], cut: dict[str, bool]
) -> None:
    ranks.run(check, 2, kind, cut)
