"""Experts in 8 bits: each is a linear map in 8 bits of its own rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainyard.models.moe.test_moe import mixture, tokens
from trainyard.fp8.delayed import TENSORS, DelayedScaling, advance_all
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.moe.experts import ExpertLinear
from trainyard.models.moe.grouped import fp8_grouped_linear, looped_linear
from trainyard.parallel.model import ExpertParallel
from trainyard.parallel.tensor.fp8_linear import fp8_linear
from trainyard.testing.pool import RankPool

CPU = torch.device("cpu")
E, FIRST, IN, OUT = 4, 1, 128, 256
RECIPES = [
    Fp8Recipe("hybrid"),
    Fp8Recipe("hybrid", "delayed", history_length=2),
    Fp8Recipe("hybrid", "rowwise"),
    Fp8Recipe("e4m3", "blockwise"),
]
OF_EXPERT = (1.0, 1.0, 2.0**-30, 2.0**30)
"""Sizes of the numbers of each: one scale for all would make zeros of the smaller ones."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def of_few_bits(m: int, k: int, seed: int) -> Tensor:
    """Quarters up to 7/4, which is in each row and column: all formats hold them, and scales are
    powers of two."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-7, 8, (m, k), generator=generator) / 4
    found[:1], found[:, :1] = 1.75, 1.75
    return found.bfloat16()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.scaling)
def test_an_expert_is_a_linear_map_in_8_bits(recipe: Fp8Recipe) -> None:
    sizes = [recipe.alignment, 0, 3 * recipe.alignment, 2 * recipe.alignment]
    rows = draw(sum(sizes), IN, seed=1).requires_grad_()
    weight = draw(E, OUT, IN, seed=2).requires_grad_()
    grad = draw(sum(sizes), OUT, seed=3)
    together = DelayedScaling(recipe, CPU, FIRST + E)
    apart = [DelayedScaling(recipe, CPU) for _ in range(E)]
    is_delayed = recipe.scaling == "delayed"
    for _ in range(2):  # delayed scales of the second step are of the first
        y = fp8_grouped_linear(
            *(rows, weight, torch.tensor(sizes), recipe, together if is_delayed else None, FIRST)
        )
        for leaf in (rows, weight):
            leaf.grad = None
        y.backward(grad)
        assert rows.grad is not None
        assert weight.grad is not None
        parts = zip(
            *(rows.detach().split(sizes), weight.detach(), grad.split(sizes), apart),
            *(y.split(sizes), rows.grad.split(sizes), weight.grad),
            strict=True,
        )
        for x, w, g, scaling, found, found_x, found_w in parts:
            if not len(x):
                assert not found_w.any()
                continue
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            right = fp8_linear(*leaves, None, recipe, scaling if is_delayed else None)
            right.backward(g)
            for ours, theirs in zip(
                (found, found_x, found_w), (right, *(leaf.grad for leaf in leaves)), strict=True
            ):
                assert theirs is not None
                assert torch.equal(ours, theirs)
        advance_all([together, *apart], None)
    for scaling, state in zip(apart, together.state[FIRST * TENSORS :].split(TENSORS), strict=True):
        assert torch.equal(state, scaling.state)


@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES if r.scaling != "delayed"], ids=lambda r: r.scaling
)
@pytest.mark.parametrize("sizes", [(19, 0, 5, 16), (0, 0, 0, 40), (0, 0, 0, 0)])
def test_numbers_of_few_bits_are_multiplied_exactly(
    recipe: Fp8Recipe, sizes: tuple[int, ...]
) -> None:
    """However many rows an expert has, and however small its numbers are."""
    by_size = list(zip(sizes, OF_EXPERT, strict=True))
    rows = torch.cat([of_few_bits(m, IN, seed=m) * size for m, size in by_size]).requires_grad_()
    grad = torch.cat([of_few_bits(m, OUT, seed=m + 1) * size for m, size in by_size])
    weight = torch.stack([of_few_bits(OUT, IN, seed=3) * size for size in OF_EXPERT])
    leaves = [rows, weight.requires_grad_()]
    found, right = (
        [y.detach(), *torch.autograd.grad(y, leaves, grad)]
        for y in (
            fp8_grouped_linear(rows, weight, torch.tensor(sizes), recipe),
            looped_linear(rows, weight, torch.tensor(sizes)),
        )
    )
    for ours, exact in zip(found, right, strict=True):
        assert torch.equal(ours, exact)


def test_tokens_visit_the_same_experts() -> None:
    layer, x = mixture().bfloat16(), tokens().bfloat16()
    plain, right = layer(x), layer.router.sums.clone()
    layer.router.sums.zero_()
    for module in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        module.fp8 = RECIPES[0]
    found = layer(x)
    assert torch.equal(layer.router.sums, right)
    assert 1e-3 < float(((found - plain).norm() / plain.norm()).detach()) < 0.1


def delayed_scales() -> Tensor:
    """After a step of experts spread over the ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    layer = ExpertLinear(
        (E, OUT, IN), ExpertParallel(ep_size=size, ep_rank=rank), bias=False, cut=1
    ).bfloat16()
    layer.fp8, layer.delayed = RECIPES[1], DelayedScaling(RECIPES[1], CPU, layer.num_experts)
    sizes, here = [19, 0, 5, 16], slice(layer.first, layer.first + E // size)
    layer.weight.data.copy_(draw(E, OUT, IN, seed=1)[here])
    rows, grad = (draw(sum(sizes), width, seed=width).split(sizes)[here] for width in (IN, OUT))
    y = layer(torch.cat(rows), torch.tensor(sizes[here]), fused=False)
    y.backward(torch.cat(grad))
    advance_all([layer.delayed], dist.group.WORLD if size > 1 else None)
    return layer.delayed.state


@pytest.mark.slow
@pytest.mark.distributed
def test_scales_of_past_steps_are_those_of_one_rank(ranks: RankPool) -> None:
    alone = delayed_scales()
    assert alone[:, 1].count_nonzero() == (E - 1) * TENSORS  # one expert has no rows
    for state in ranks.run(delayed_scales, 2):
        assert torch.equal(state, alone)
