"""Collectives of expert parallelism, with their transposes for the backward pass.

Each rank sends and receives another number of rows. With group None, one rank alone, the argument
is returned. r rows, h channels, n ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.model import group_size
from trainyard.parallel.tensor import collectives


def exchange_rows(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup | None
) -> Tensor:
    """All-to-all of rows, and of their gradients the other way.

    x: (sum of send, h), the rows for rank 0 first. send, receive: rows for and from each rank.
    Returns (sum of receive, h)."""
    if group is None:
        return x
    moved: Tensor = _Exchange.apply(x, send, receive, group)  # type: ignore[no-untyped-call]
    return moved


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup
) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    with communicating():
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


def gather_tokens(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather along the first dim, and the sum of the gradients of each part to its rank.

    x: (t, ...), alike on every rank. Returns (n t, ...)."""
    if group is None:
        return x
    whole: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return whole


def scatter_sums(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The transpose: the sum over ranks of each part of the first dim, to its rank.

    x: (n t, ...), a summand. Returns (t, ...)."""
    if group is None:
        return x
    part: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return collectives.all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return collectives.reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_gather(grad, ctx.group), None


def counts_of_all(counts: Tensor, group: ProcessGroup | None) -> Tensor:
    """(n, e) the `counts` (e) of every rank."""
    return collectives.all_gather(counts, group).view(group_size(group), -1)
