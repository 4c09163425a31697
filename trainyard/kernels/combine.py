"""Weighted sums of the rows of each token's experts, and their gradients, in one pass each.

t tokens, k rows of each, r rows, h channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit
def _sum(
    rows_ptr,
    place_ptr,
    weights_ptr,
    out_ptr,
    width,
    topk: tl.constexpr,
    weighted: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * block + tl.arange(0, block)
    inside = channels < width
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(topk):
        place = tl.load(place_ptr + token * topk + choice)
        if place >= 0:
            row = tl.load(rows_ptr + place * width + channels, mask=inside).to(tl.float32)
            if weighted:
                row *= tl.load(weights_ptr + token * topk + choice).to(tl.float32)
            total += row
    tl.store(out_ptr + token * width + channels, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(
    grad_ptr,
    rows_ptr,
    place_ptr,
    weights_ptr,
    of_rows_ptr,
    of_weights_ptr,
    width,
    topk: tl.constexpr,
    block: tl.constexpr,
):
    choice = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + choice)
    parts = tl.zeros((block,), tl.float32)
    if place >= 0:
        weight = tl.load(weights_ptr + choice).to(tl.float32)
        for begin in range(0, width, block):
            channels = begin + tl.arange(0, block)
            inside = channels < width
            grad = tl.load(
                grad_ptr + (choice // topk) * width + channels, mask=inside, other=0.0
            ).to(tl.float32)
            row = tl.load(rows_ptr + place * width + channels, mask=inside, other=0.0)
            parts += grad * row.to(tl.float32)
            of_row = (grad * weight).to(of_rows_ptr.dtype.element_ty)
            tl.store(of_rows_ptr + place * width + channels, of_row, mask=inside)
    tl.store(of_weights_ptr + choice, tl.sum(parts).to(of_weights_ptr.dtype.element_ty))


def combine(rows: Tensor, place: Tensor, weights: Tensor | None, topk: int) -> Tensor:
    """(t, h) sums over k of weight x row, added up in fp32. rows: (r, h); place: (t k) int64, the
    row of each choice, -1: none; weights: (t, k), None: all 1."""
    rows, width = rows.contiguous(), rows.shape[1]
    out = rows.new_empty(len(place) // topk, width)
    grid = (len(out), triton.cdiv(width, BLOCK))
    _sum[grid](
        *(rows, place, rows if weights is None else weights.contiguous(), out, width),
        topk=topk,
        weighted=weights is not None,
        block=BLOCK,
        num_warps=WARPS,
    )
    return out


def combine_backward(
    grad: Tensor, rows: Tensor, place: Tensor, weights: Tensor, *, every_row: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of rows (r, h) and weights (t, k). grad: (t, h). every_row: each row is the place
    of a choice; the gradient of others is 0."""
    grad, rows, width = grad.contiguous(), rows.contiguous(), rows.shape[1]
    of_rows = torch.empty_like(rows) if every_row else torch.zeros_like(rows)
    of_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    _gradients[(len(place),)](
        *(grad, rows, place, weights.contiguous(), of_rows, of_weights, width),
        topk=weights.shape[1],
        block=BLOCK,
        num_warps=WARPS,
    )
    return of_rows, of_weights
