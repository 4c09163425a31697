"""Cut linear maps against torch's own, forward and all gradients; alone they are torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import has_partial_grad, shard_of
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_SUM_ORDER

pytestmark = pytest.mark.slow

S, B, IN, OUT = 8, 2, 12, 24

CUTS: list[dict[str, bool]] = [
    {},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "tp_comm_overlap": True},
]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(whole: Tensor, parallel: ModelParallel, dim: int = 0) -> Tensor:
    return whole.chunk(parallel.tp_size, dim)[parallel.tp_rank]


def fill(parameter: nn.Parameter | None, whole: Tensor) -> Tensor:
    """Put the rank's part of `whole` in; `whole` is a leaf that the reference will use."""
    if parameter is not None:
        shard = shard_of(parameter)
        parameter.data.copy_(whole if shard is None else shard.take(whole))
    return whole.requires_grad_()


def check_grad(
    parameter: nn.Parameter | None, whole: Tensor | None, parallel: ModelParallel
) -> None:
    assert (parameter is None) == (whole is None)
    if parameter is None or whole is None:
        return
    assert parameter.grad is not None
    assert whole.grad is not None
    shard, grad = shard_of(parameter), parameter.grad
    if has_partial_grad(parameter):
        dist.all_reduce(grad, group=parallel.tp)
    expected = whole.grad if shard is None else shard.take(whole.grad)
    torch.testing.assert_close(grad, expected, **FP32_SUM_ORDER)


def run_reference(
    layer: ColumnParallelLinear | RowParallelLinear, bias: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Fills the layer; returns the whole weight, bias, input, output gradient and output."""
    weight = fill(layer.weight, draw(OUT, IN, seed=1))
    b = fill(layer.bias, draw(OUT, seed=2)) if bias else None
    x, grad = draw(S, B, IN, seed=3).requires_grad_(), draw(S, B, OUT, seed=4)
    expected = functional.linear(x, weight, b)
    expected.backward(grad)
    return weight, b, x, grad, expected


def check_column(cut: dict[str, bool], bias: bool, parts: int) -> None:
    parallel = ModelParallel(tp=dist.group.WORLD, **cut)
    layer = ColumnParallelLinear(IN, OUT, bias=bias, parallel=parallel, parts=parts)
    weight, b, x, grad, expected = run_reference(layer, bias)
    mine = (part(x, parallel) if parallel.sequence_parallel else x).detach().requires_grad_()
    y = layer(mine)
    channels = shard_of(layer.weight)
    assert channels is not None
    index = torch.cat([torch.arange(p.whole, p.whole + p.length) for p in channels.cuts[0].pieces])
    torch.testing.assert_close(y, expected[..., index], **FP32_SUM_ORDER)
    y.backward(grad[..., index])
    assert x.grad is not None
    whole = part(x.grad, parallel) if parallel.sequence_parallel else x.grad
    torch.testing.assert_close(mine.grad, whole, **FP32_SUM_ORDER)
    check_grad(layer.weight, weight, parallel)
    check_grad(layer.bias, b, parallel)


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("bias", "parts"), [(True, 1), (False, 2)])
def test_column_parallel_matches_linear(
    ranks: RankPool, tp: int, cut: dict[str, bool], bias: bool, parts: int
) -> None:
    ranks.run(check_column, tp, cut, bias, parts)


def check_row(cut: dict[str, bool], bias: bool) -> None:
    parallel = ModelParallel(tp=dist.group.WORLD, **cut)
    layer = RowParallelLinear(IN, OUT, bias=bias, parallel=parallel)
    weight, b, x, grad, expected = run_reference(layer, bias)
    mine = part(x, parallel, dim=2).detach().requires_grad_()
    y = layer(mine)
    cut_sequence = parallel.sequence_parallel
    torch.testing.assert_close(
        y, part(expected, parallel) if cut_sequence else expected, **FP32_SUM_ORDER
    )
    y.backward(part(grad, parallel) if cut_sequence else grad)
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, part(x.grad, parallel, dim=2), **FP32_SUM_ORDER)
    check_grad(layer.weight, weight, parallel)
    check_grad(layer.bias, b, parallel)


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_matches_linear(
    ranks: RankPool, tp: int, cut: dict[str, bool], bias: bool
) -> None:
    ranks.run(check_row, tp, cut, bias)


def check_frozen(cut: dict[str, bool]) -> None:
    """A weight that is not trained costs no product, and does not break the others' gradients."""
    parallel = ModelParallel(tp=dist.group.WORLD, **cut)
    column = ColumnParallelLinear(IN, OUT, bias=True, parallel=parallel)
    row = RowParallelLinear(OUT, IN, bias=False, parallel=parallel)
    fill(column.weight, draw(OUT, IN, seed=1))
    fill(column.bias, draw(OUT, seed=2))
    fill(row.weight, draw(IN, OUT, seed=3))
    x = draw(S, B, IN, seed=4)
    x = part(x, parallel) if parallel.sequence_parallel else x
    row(column(x)).sum().backward()
    assert column.bias is not None
    expected = column.bias.grad
    column.zero_grad()
    column.weight.requires_grad_(False)
    row.weight.requires_grad_(False)
    row(column(x)).sum().backward()
    assert column.weight.grad is None
    assert column.bias.grad is not None
    assert expected is not None
    assert torch.equal(column.bias.grad, expected)


class TwoMatrices(nn.Module):
    def __init__(self, parallel: ModelParallel) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(IN, OUT, bias=True, parallel=parallel)
        self.down = RowParallelLinear(OUT, IN, bias=True, parallel=parallel)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(draw(*parameter.shape, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


def results(module: Any, parallel: ModelParallel) -> list[Tensor]:
    x = draw(S, B, IN, seed=7)
    x = (part(x, parallel) if parallel.sequence_parallel else x).clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return [y.detach(), x.grad, *grads]


def check_compiled(cut: dict[str, bool]) -> None:
    parallel = ModelParallel(tp=dist.group.WORLD, **cut)
    module = TwoMatrices(parallel)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(results(module, parallel), results(compiled, parallel), strict=True):
        torch.testing.assert_close(eager, traced, **FP32_SUM_ORDER)


@pytest.mark.distributed
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("check", [check_frozen, check_compiled], ids=["frozen", "compiled"])
def test_two_layers_over_ranks(
    ranks: RankPool, check: Callable[[dict[str, bool]], None], cut: dict[str, bool]
) -> None:
    ranks.run(check, 2, cut)


def test_alone_they_are_functional_linear() -> None:
    x = draw(S, B, IN, seed=1)
    for module in (
        ColumnParallelLinear(IN, OUT, bias=True, parallel=ALONE),
        RowParallelLinear(IN, OUT, bias=True, parallel=ALONE),
    ):
        for parameter in module.parameters():
            parameter.data.copy_(draw(*parameter.shape, seed=2))
            assert shard_of(parameter) is None
            assert not has_partial_grad(parameter)
        assert torch.equal(module(x), functional.linear(x, module.weight, module.bias))
