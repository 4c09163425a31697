"""The likeliest token of each row, in place of torch's argmax and a check that its logit is finite:
a row is shared out among programs, and a second kernel compares their answers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, MOST_PARTS = 2048, 128
"""Logits that are read at a time; programs of a row at most."""


@triton.jit
def _likeliest_of_part(
    logits_ptr,
    values_ptr,
    places_ptr,
    width,
    row_stride,
    num_rounds: tl.constexpr,
    num_parts: tl.constexpr,
    block: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * num_rounds * block
    highest = tl.full((block,), float("-inf"), tl.float32)
    places = tl.zeros((block,), tl.int32) + first
    for number in range(num_rounds):
        place = first + number * block + tl.arange(0, block)
        value = tl.load(
            logits_ptr + row * row_stride + place, mask=place < width, other=float("-inf")
        ).to(tl.float32)
        value = tl.where(value != value, float("inf"), value)  # NaN wins, as in torch
        places = tl.where(value > highest, place, places)
        highest = tl.maximum(value, highest)
    best = tl.max(highest, 0)
    place = tl.min(tl.where(highest == best, places, 2147483647), 0)
    tl.store(values_ptr + row * num_parts + part, best)
    tl.store(places_ptr + row * num_parts + part, place)


@triton.jit
def _likeliest(values_ptr, places_ptr, out_ptr, no_token, num_parts: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, num_parts)
    value = tl.load(values_ptr + row * num_parts + part)
    place = tl.load(places_ptr + row * num_parts + part)
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, place, 2147483647), 0).to(tl.int64)
    is_number = (best < float("inf")) & (best > float("-inf"))
    tl.store(out_ptr + row, tl.where(is_number, token, no_token))


def greedy_kernel(logits: Tensor, no_token: int) -> Tensor:
    """(b) int64, the first place of the highest of each row; `no_token` where that is NaN or
    infinite. logits: (b, V), numbers of a row beside each other."""
    rows, width = logits.shape
    num_parts = min(triton.next_power_of_2(triton.cdiv(width, BLOCK)), MOST_PARTS)
    values = torch.empty(rows, num_parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, num_parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _likeliest_of_part[(rows, num_parts)](
        *(logits, values, places, width, logits.stride(0)),
        num_rounds=triton.cdiv(width, num_parts * BLOCK),
        num_parts=num_parts,
        block=BLOCK,
        num_warps=8,
    )
    _likeliest[(rows,)](values, places, out, no_token, num_parts=num_parts, num_warps=4)
    return out
