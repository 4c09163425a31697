"""Each region is a linear map whose backward is its transpose; and what it maps to.

A space is "whole" where every rank holds the same tensor, so it counts once, or "parts" where ranks
hold different ones (parts of a whole, or summands of it), so all count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.parallel.tensor import mappings
from trainyard.parallel.tensor.collectives import all_reduce
from trainyard.testing.pool import RankPool

S, B, H = 8, 3, 12

REGIONS = {
    # name: (space of the argument, space of the result, dim of the argument that is cut)
    "reduce_from_tp": ("parts", "whole", None),
    "gather_from_tp": ("parts", "whole", 2),
    "reduce_scatter_to_sp": ("parts", "parts", None),
}


def region(name: str) -> Callable[[Tensor, ProcessGroup | None], Tensor]:
    found: Callable[[Tensor, ProcessGroup | None], Tensor] = getattr(mappings, name)
    return found


def member(shape: tuple[int, ...] | torch.Size, space: str, seed: int) -> Tensor:
    seed += 0 if space == "whole" else 100 * (dist.get_rank() + 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inner(x: Tensor, y: Tensor, space: str) -> Tensor:
    product = (x * y).sum()
    return product if space == "whole" else all_reduce(product, dist.group.WORLD)


def check_transpose(name: str) -> None:
    source, target, cut = REGIONS[name]
    shape = [S, B, H]
    if cut is not None:
        shape[cut] //= dist.get_world_size()
    x = member(tuple(shape), source, 1).requires_grad_()
    y = region(name)(x, dist.group.WORLD)
    cotangent = member(y.shape, target, 2)
    y.backward(cotangent)
    assert x.grad is not None
    torch.testing.assert_close(
        inner(y.detach(), cotangent, target), inner(x.detach(), x.grad, source)
    )
    if target == "whole":
        assert torch.equal(all_reduce(y.detach(), dist.group.WORLD, "max"), y)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", REGIONS)
def test_the_backward_is_the_transpose(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(check_transpose, size, name)


def check_values() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    whole = member((S, B, H), "whole", 3)
    summand = member((S, B, H), "parts", 4)
    total = all_reduce(summand, group)
    along_h = whole.chunk(size, dim=2)[rank]
    assert torch.equal(mappings.reduce_from_tp(summand, group), total)
    assert torch.equal(mappings.gather_from_tp(along_h, group), whole)
    scattered = mappings.reduce_scatter_to_sp(summand, group)
    torch.testing.assert_close(scattered, total.chunk(size)[rank])


@pytest.mark.few_cases(1)
@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
def test_parts_and_wholes_are_where_they_should_be(ranks: RankPool, size: int) -> None:
    ranks.run(check_values, size)


@pytest.mark.parametrize("name", REGIONS)
def test_alone_nothing_happens(name: str) -> None:
    x = torch.randn(S, B, H)
    assert region(name)(x, None) is x
