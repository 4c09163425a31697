"""Gradients of queries, keys and values, put together as the rows of linear_qkv are ordered, and
added up over the tokens: the gradient of that product's bias. Each is read once.

s sequence, b batch, g groups, r queries of a group, d head channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS, WARPS = 4096, 4
"""That a program has at a time."""


@triton.jit
def _join(
    q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, num_rows, batch, d, width,
    q_s, q_b, q_g, q_r, k_s, k_b, k_g, v_s, v_b, v_g,
    per_group: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Program (h, p) of P: a head, and of the row blocks each P-th from p on."""
    head = tl.program_id(0)
    group, place = head // (per_group + 2), head % (per_group + 2)
    out_ptr += head * d
    sums_ptr += tl.program_id(1).to(tl.int64) * width + head * d
    if place < per_group:
        q_ptr += group.to(tl.int64) * q_g + place.to(tl.int64) * q_r
        _copy(q_ptr, q_s, q_b, out_ptr, sums_ptr, num_rows, batch, d, width, rows, block)
    elif place == per_group:
        k_ptr += group.to(tl.int64) * k_g
        _copy(k_ptr, k_s, k_b, out_ptr, sums_ptr, num_rows, batch, d, width, rows, block)
    else:
        v_ptr += group.to(tl.int64) * v_g
        _copy(v_ptr, v_s, v_b, out_ptr, sums_ptr, num_rows, batch, d, width, rows, block)


@triton.jit
def _copy(
    from_ptr, from_s, from_b, out_ptr, sums_ptr, num_rows, batch, d, width,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, block)
    part, parts = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros((rows, block), tl.float32)
    for first in range(part * rows, num_rows, parts * rows):
        row = first + tl.arange(0, rows)
        inside = (row < num_rows)[:, None] & (channels < d)[None, :]
        start = (row // batch).to(tl.int64) * from_s + (row % batch).to(tl.int64) * from_b
        grad = tl.load(from_ptr + start[:, None] + channels[None, :], mask=inside, other=0.0)
        at = row.to(tl.int64)[:, None] * width + channels[None, :]
        tl.store(out_ptr + at, grad, mask=inside)
        total += grad.to(tl.float32)
    tl.store(sums_ptr + channels, tl.sum(total, 0), mask=channels < d)


def join_heads(q: Tensor, k: Tensor, v: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(s, b, g, r + 2, d), and (parts, g (r + 2) d) fp32: that added up over the tokens of each
    part. q: (s, b, g, r, d); k, v: (s, b, g, 1, d)."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    s, b, g, r, d = q.shape
    heads = g * (r + 2)
    out = q.new_empty(s, b, g, r + 2, d)
    sums = q.new_empty((parts, heads * d), dtype=torch.float32)
    if out.numel():
        block = triton.next_power_of_2(d)
        _join[(heads, parts)](
            *(q, k, v, out, sums, s * b, b, d, heads * d),
            *(*q.stride()[:4], *k.stride()[:3], *v.stride()[:3]),
            per_group=r,
            rows=max(ELEMENTS // block, 1),
            block=block,
            num_warps=WARPS,
        )
    return out, sums
