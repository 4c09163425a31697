"""Linear maps in 8 bits: their three products are those of the cast tensors, alone and cut over
ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.fp8.blockwise import cast_blocks, cast_tiles, decode
from trainyard.fp8.cast import FORWARD, WIDE, Fp8Pair, cast_pair
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.fp8.rowwise import cast_rows
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import shard_of
from trainyard.parallel.tensor.fp8_linear import fp8_linear
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainyard.testing.pool import RankPool

S, B, IN, OUT = 16, 2, 32, 64
HYBRID, E4M3 = Fp8Recipe("hybrid"), Fp8Recipe("e4m3")
ROWWISE, BLOCKWISE = Fp8Recipe("e4m3", "rowwise"), Fp8Recipe("e4m3", "blockwise")
EIGHT_BITS, OF_GRADIENTS = 0.05, 0.1
"""Relative distance that two roundings to e4m3, and to e5m2, may make."""
BF16 = 2.0**-8
"""... and two to bf16."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    pair = cast_pair(x.flatten(0, -2), dtype)
    return (pair.rows.double() * pair.row_scale.double()).view(x.shape)


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
    assert distance(y, x8 @ weight8.t() + bias.detach()) < BF16
    assert distance(x.grad, grad8 @ weight8) < BF16
    assert distance(weight.grad, grad8.flatten(0, 1).t() @ x8.flatten(0, 1)) < BF16
    assert distance(bias.grad, grad.double().sum((0, 1))) < BF16


def test_rowwise_products_have_a_scale_for_each_row_and_column() -> None:
    x, weight = draw(S, B, IN, seed=1).requires_grad_(), draw(OUT, IN, seed=2).requires_grad_()
    bias, grad = draw(OUT, seed=3).requires_grad_(), draw(S, B, OUT, seed=4)
    x.data[3, 1] *= 2**12
    weight.data[:, 5] *= 2**-12
    y = fp8_linear(x, weight, bias, ROWWISE)
    y.backward(grad)
    pairs = (cast_rows(t.detach().flatten(0, -2), FORWARD) for t in (x, weight, grad))
    (rows_x, columns_x), (rows_w, columns_w), (rows_g, columns_g) = (
        (
            pair.rows.double() * pair.row_scale.double().unsqueeze(1),
            pair.columns.double() * pair.column_scale.double().unsqueeze(1),
        )
        for pair in pairs
    )
    for rows, exact in ((rows_x, x.flatten(0, 1)), (columns_w, weight.t())):
        moved = (rows - exact.detach().double()).abs()
        least = exact.detach().double().abs().amax(1, keepdim=True) / 448 * 2.0**-9
        assert (moved <= torch.maximum(exact.detach().double().abs() * 2.0**-4, least)).all()
    assert distance(y.flatten(0, 1), rows_x @ rows_w.t() + bias.detach()) < BF16
    assert x.grad is not None
    assert distance(x.grad.flatten(0, 1), rows_g @ columns_w.t()) < BF16
    assert distance(weight.grad, columns_g @ columns_x.t()) < BF16


def test_blockwise_products_have_the_tiles_along_what_they_sum_over() -> None:
    x, weight = draw(32, 4, 256, seed=1).requires_grad_(), draw(384, 256, seed=2).requires_grad_()
    bias, grad = draw(384, seed=3).requires_grad_(), draw(32, 4, 384, seed=4)
    y = fp8_linear(x, weight, bias, BLOCKWISE)
    y.backward(grad)
    rows_x, columns_x = both_decoded(cast_tiles(x.detach().flatten(0, 1), FORWARD))
    rows_w, columns_w = both_decoded(cast_blocks(weight.detach(), FORWARD))
    rows_g, columns_g = both_decoded(cast_tiles(grad.flatten(0, 1), FORWARD))
    assert torch.equal(rows_w, columns_w.t())
    assert not torch.equal(rows_x, columns_x.t())
    assert distance(y.flatten(0, 1), rows_x @ rows_w.t() + bias.detach()) < BF16
    assert x.grad is not None
    assert distance(x.grad.flatten(0, 1), rows_g @ columns_w.t()) < BF16
    assert distance(weight.grad, columns_g @ columns_x.t()) < BF16
    assert distance(bias.grad, grad.double().sum((0, 1))) < BF16


def both_decoded(pair: Fp8Pair) -> tuple[Tensor, Tensor]:
    return (
        decode(pair.rows, pair.row_scale).double(),
        decode(pair.columns, pair.column_scale).double(),
    )


def test_what_is_kept_for_the_backward_pass_has_8_bits() -> None:
    x, weight = draw(S, B, IN, seed=1).requires_grad_(), draw(OUT, IN, seed=2).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fp8_linear(x, weight, None, HYBRID)
    assert {tensor.dtype for tensor in kept if tensor.ndim} == {FORWARD}


def check(kind: type[Any], recipe: Fp8Recipe, cut: dict[str, bool]) -> None:
    """A layer cut over the ranks against one rank's: within the rounding of 8 bits where each rank
    scales its part, of bf16 where tiles are the same."""
    times = recipe.alignment // 16
    width_in, width_out = IN * times, OUT * times
    forward, backward = (BF16, BF16) if recipe == BLOCKWISE else (EIGHT_BITS, OF_GRADIENTS)
    parallel = ModelParallel(tp=dist.group.WORLD, **cut)
    layer = kind(width_in, width_out, bias=False, parallel=parallel).bfloat16()
    layer.fp8 = recipe
    weight = draw(width_out, width_in, seed=1)
    shard = shard_of(layer.weight)
    assert shard is not None
    layer.weight.data.copy_(shard.take(weight))
    weight.requires_grad_()
    batch = max(B, times)
    x = draw(S, batch, width_in, seed=3).requires_grad_()
    grad = draw(S, batch, width_out, seed=4)
    expected = fp8_linear(x, weight, None, recipe)
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
    assert distance(y, theirs_y) < forward
    assert x.grad is not None
    whole = x.grad
    if not is_column:
        whole = part(whole, 2)
    elif parallel.sequence_parallel:
        whole = part(whole, 0)
    assert distance(mine.grad, whole) < backward
    assert weight.grad is not None
    assert distance(layer.weight.grad, shard.take(weight.grad)) < backward


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("recipe", [HYBRID, ROWWISE, BLOCKWISE], ids=lambda r: r.scaling)
@pytest.mark.parametrize("cut", [{}, {"sequence_parallel": True}], ids=["tp", "sp"])
def test_a_cut_layer_is_one_ranks(
    ranks: RankPool, kind: type[Any], recipe: Fp8Recipe, cut: dict[str, bool]
) -> None:
    ranks.run(check, 2, kind, recipe, cut)
