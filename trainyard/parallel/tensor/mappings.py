"""Regions of tensor and sequence parallelism: pairs of a collective and its transpose.

Each function is the forward half, and autograd runs the other (arXiv:1909.08053, section 3;
arXiv:2205.05198, section 4.2). "tp" cuts the last dim (channels), "sp" the first (the sequence),
over the same ranks. A group that is None is one rank alone: the argument comes back.

s sequence, b batch, h channels, n ranks of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.parallel.model import group_rank, group_size
from trainyard.parallel.tensor import collectives

Mapping = Callable[[Tensor, ProcessGroup], Tensor]


# --- the collectives, without autograd --------------------------------------------------------


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _split_first(x: Tensor, group: ProcessGroup) -> Tensor:
    return _part(x, 0, group)


def _split_last(x: Tensor, group: ProcessGroup) -> Tensor:
    return _part(x, -1, group)


def _part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    size = group_size(group)
    assert x.shape[dim] % size == 0, (tuple(x.shape), dim, size)
    length = x.shape[dim] // size
    return x.narrow(dim, group_rank(group) * length, length).contiguous()


def _gather_last(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = collectives.all_gather(x.unsqueeze(0), group)  # (n, ..., h / n)
    return torch.cat(parts.unbind(0), dim=-1)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.all_reduce(x, group)


class _Region(torch.autograd.Function):
    """A linear map of the ranks' tensors, and its transpose as the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, forward: Mapping, transpose: Mapping
    ) -> Tensor:
        ctx.group, ctx.transpose = group, transpose
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(grad, ctx.group), None, None, None


def _region(x: Tensor, group: ProcessGroup | None, forward: Mapping, transpose: Mapping) -> Tensor:
    if group is None:
        return x
    mapped: Tensor = _Region.apply(x, group, forward, transpose)  # type: ignore[no-untyped-call]
    return mapped


# --- tensor parallelism -----------------------------------------------------------------------


def copy_to_tp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Identity forward, all-reduce backward: `f` in Megatron-LM.

    x: any shape, equal on every rank; goes into something that is cut."""
    return _region(x, group, _same, _sum)


def reduce_from_tp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-reduce forward, identity backward: `g` in Megatron-LM.

    x: any shape, one summand per rank. Returns the sum, equal on every rank."""
    return _region(x, group, _sum, _same)


def gather_from_tp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather of channels forward, split backward. x: (..., h / n). Returns (..., h).

    For a result that every rank goes on with alike: its gradient is taken from the own copy."""
    return _region(x, group, _gather_last, _split_last)


def scatter_to_tp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's channels forward, all-gather backward. x: (..., h). Returns (..., h / n)."""
    return _region(x, group, _split_last, _gather_last)


# --- sequence parallelism ---------------------------------------------------------------------


def gather_from_sp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather of the sequence forward, reduce-scatter backward. x: (s / n, b, h).

    Returns (s, b, h), for something that is cut: each rank has a summand of its gradient."""
    return _region(x, group, collectives.all_gather, collectives.reduce_scatter)


def reduce_scatter_to_sp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Reduce-scatter along the sequence forward, all-gather backward. x: (s, b, h), a summand.

    Returns (s / n, b, h)."""
    return _region(x, group, collectives.reduce_scatter, collectives.all_gather)


def scatter_to_sp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of the sequence forward, all-gather backward. x: (s, b, h), equal on every
    rank. Returns (s / n, b, h)."""
    return _region(x, group, _split_first, collectives.all_gather)


def gather_whole_from_sp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather of the sequence forward, split backward: where every rank goes on alike.

    x: (s / n, b, h). Returns (s, b, h)."""
    return _region(x, group, collectives.all_gather, _split_first)


# --- exchange ---------------------------------------------------------------------------------


def all_to_all(
    x: Tensor, group: ProcessGroup | None, *, split_dim: int = 0, concat_dim: int = 0
) -> Tensor:
    """Cut `x` along `split_dim`, give part i to rank i, and join what came along `concat_dim`.

    Its transpose is itself with the dims exchanged. With (split heads, concat sequence) it turns
    (s / n, b, heads, d) into (s, b, heads / n, d) (DeepSpeed-Ulysses, arXiv:2309.14509)."""
    if group is None:
        return x
    exchanged: Tensor = _AllToAll.apply(x, group, split_dim, concat_dim)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int
    ) -> Tensor:
        ctx.group, ctx.dims = group, (split_dim, concat_dim)
        return _exchange(x, group, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim = ctx.dims
        return _exchange(grad, ctx.group, concat_dim, split_dim), None, None, None


def _exchange(x: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    size = group_size(group)
    assert x.shape[split_dim] % size == 0, (tuple(x.shape), split_dim, size)
    parts = torch.stack(x.chunk(size, dim=split_dim))  # (n, ...)
    return torch.cat(collectives.all_to_all_first(parts, group).unbind(0), dim=concat_dim)
