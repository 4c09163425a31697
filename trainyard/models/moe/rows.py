"""Tokens as rows in the order of their experts, and back.

Both directions are gathers, and so are their backward passes: the same bits every time, on GPUs
too. There kernels add up rows as they gather them; elsewhere torch does.

t tokens, k experts that a token visits, r rows, h channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard.kernels.available import TRITON
from trainyard.models.moe import routing


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for experts, one after the other."""

    source: Tensor
    """(r) int64, which of the t x k choices a row is of."""
    place: Tensor
    """(t k) int64, the row of each choice; any row for one without."""
    counts: Tensor
    """(e) int64, rows of each expert."""
    topk: int
    kept: Tensor | None = None
    """(t k, 1) bool, which choices have a row; None: all."""
    filled: Tensor | None = None
    """(r, 1) bool, which rows are of a choice, not padding; None: all."""

    def spread(self, x: Tensor) -> Tensor:
        """The row of every choice, (r, h); padding is 0. x: (t, h)."""
        rows: Tensor = _Spread.apply(x, self)  # type: ignore[no-untyped-call]
        return rows

    def collect(self, rows: Tensor) -> Tensor:
        """(t, k, h) from (r, h): the transpose, without the sum; 0 for a choice without a row."""
        choices: Tensor = _Collect.apply(rows, self)  # type: ignore[no-untyped-call]
        return choices

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """(t, h) sums of the rows of each token's choices, by their weights (t, k)."""
        if TRITON and rows.is_cuda:
            sums: Tensor = _Combine.apply(rows, weights, self)  # type: ignore[no-untyped-call]
            return sums
        # Not a batched product of (1, k) and (k, h), whose backward is slow.
        return (self.collect(rows) * weights.to(rows.dtype).unsqueeze(-1)).sum(1)

    def place_or_none(self) -> Tensor:
        """(t k) `place`, -1 for a choice without a row."""
        if self.kept is None:
            return self.place
        return self.place.masked_fill(~self.kept.flatten(), -1)


def _spread(x: Tensor, rows: Rows) -> Tensor:
    found = x.index_select(0, rows.source // rows.topk)
    return found if rows.filled is None else found * rows.filled


def _at_choices(found: Tensor, rows: Rows) -> Tensor:
    if found.shape[0] == 0:  # no choice has a row
        return found.new_zeros(len(rows.place) // rows.topk, rows.topk, *found.shape[1:])
    chosen = found.index_select(0, rows.place)
    if rows.kept is not None:
        chosen = chosen * rows.kept
    return chosen.view(-1, rows.topk, *found.shape[1:])


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return _spread(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        if TRITON and grad.is_cuda:
            from trainyard.kernels.combine import combine

            return combine(grad, rows.place_or_none(), None, rows.topk), None
        return _at_choices(grad, rows).sum(1), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return _at_choices(found, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        found = grad.flatten(0, 1).index_select(0, rows.source)
        return (found if rows.filled is None else found * rows.filled), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, weights: Tensor, rows: Rows) -> Tensor:
        from trainyard.kernels.combine import combine

        ctx.save_for_backward(found, weights)
        ctx.rows = rows
        return combine(found, rows.place_or_none(), weights, rows.topk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from trainyard.kernels.combine import combine_backward

        rows, (found, weights) = ctx.rows, ctx.saved_tensors
        every = rows.filled is None
        return *combine_backward(grad, found, rows.place_or_none(), weights, every_row=every), None


def rows_of(
    experts: Tensor, num_experts: int, kept: Tensor | None = None, pad_to: int | None = None
) -> Rows:
    """The rows of choices. experts: (t, k) numbers below `num_experts`; kept: (t, k) bool, those
    with a row; None: all. pad_to: rows of every expert, of which none has more."""
    flat, topk = experts.flatten(), experts.shape[1]
    if kept is not None:
        flat = flat.masked_fill(~kept.flatten(), num_experts)  # behind all others
    order = flat.argsort(stable=True)
    counts = routing.counts(flat, num_experts)
    mask = None if kept is None else kept.reshape(-1, 1)
    if pad_to is not None:
        return _padded(order, counts, topk, mask, pad_to)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    if kept is not None:
        total = int(counts.sum())  # waits for the device
        order, place = order[:total], place.clamp(max=max(total - 1, 0))
    return Rows(order, place, counts, topk, mask)


def _padded(order: Tensor, counts: Tensor, topk: int, kept: Tensor | None, size: int) -> Rows:
    """`size` rows for every expert."""
    num_experts, device = len(counts), order.device
    ends = counts.cumsum(0)
    within = torch.arange(size, device=device)
    filled = within < counts.unsqueeze(1)  # (e, size)
    sorted_place = (ends - counts).unsqueeze(1) + within
    source = order[sorted_place.clamp(max=len(order) - 1)]
    place = torch.zeros_like(order)
    rows = torch.arange(num_experts * size, device=device).view(num_experts, size)
    place[source[filled]] = rows[filled]
    sizes = torch.full_like(counts, size)
    return Rows(source.flatten(), place, sizes, topk, kept, filled.view(-1, 1))
