"""Regions of tensor and sequence parallelism: pairs of a collective and its transpose.

Each function is the forward half; autograd runs the other (arXiv:1909.08053, section 3;
arXiv:2205.05198, section 4.2). "tp" shards the last dim (channels), "sp" the first (the sequence),
over the same ranks. With group None, one rank alone, the argument is returned.

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


def _split_last(x: Tensor, group: ProcessGroup) -> Tensor:
    size = group_size(group)
    assert x.shape[-1] % size == 0, (tuple(x.shape), size)
    return x.chunk(size, dim=-1)[group_rank(group)].contiguous()


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

    For what every rank has alike and uses for its own channels: their gradients are added up."""
    return _region(x, group, _same, _sum)


def reduce_from_tp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-reduce forward, identity backward: `g` in Megatron-LM.

    x: any shape, one summand per rank. Returns the sum, equal on every rank."""
    return _region(x, group, _sum, _same)


def gather_from_tp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather of channels forward, split backward. x: (..., h / n). Returns (..., h).

    For a result that every rank uses alike: the gradient is that of this rank's copy."""
    return _region(x, group, _gather_last, _split_last)


# --- sequence parallelism ---------------------------------------------------------------------


def reduce_scatter_to_sp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Reduce-scatter along the sequence forward, all-gather backward. x: (s, b, h), a summand.

    Returns (s / n, b, h)."""
    return _region(x, group, collectives.reduce_scatter, collectives.all_gather)


def gather_from_sp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather along the sequence forward, reduce-scatter backward. x: (s / n, b, h). Returns
    (s, b, h), which every rank uses for its own channels."""
    return _region(x, group, collectives.all_gather, collectives.reduce_scatter)
