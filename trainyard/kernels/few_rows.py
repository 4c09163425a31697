"""The product of few rows with a matrix, both of 8 bits, which takes as long as reading the matrix.

Libraries read it at a third to three quarters of the speed of memory, as their tiles are of 128
rows; here a tile is a few rows of the inputs, and of the matrix what keeps all processors busy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS, DEPTH, WARPS, STAGES = 64, 256, 4, 4
"""Channels of a program, numbers of each that are read at a time, and the reads under way."""
LEAST_ROWS = 16
"""Of a product; fewer are padded."""


@triton.jit
def _product(
    rows_ptr,
    values_ptr,
    row_scale_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_channels,
    width: tl.constexpr,
    padded_rows: tl.constexpr,
    channels: tl.constexpr,
    depth: tl.constexpr,
):
    channel = tl.program_id(0) * channels + tl.arange(0, channels)
    row, number = tl.arange(0, padded_rows), tl.arange(0, depth)
    is_channel, is_row = channel < num_channels, row < num_rows
    values_at = values_ptr + channel.to(tl.int64)[:, None] * width + number[None, :]
    rows_at = rows_ptr + row[None, :] * width + number[:, None]
    sums = tl.zeros((channels, padded_rows), tl.float32)
    for first in range(0, width, depth):
        inside = first + number < width
        values = tl.load(
            values_at,
            mask=is_channel[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        rows = tl.load(rows_at, mask=is_row[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(values, rows, sums)
        values_at += depth
        rows_at += depth
    scale = tl.load(scale_ptr + channel, mask=is_channel, other=0.0)
    row_scale = tl.load(row_scale_ptr + row, mask=is_row, other=0.0)
    sums = sums * scale[:, None] * row_scale[None, :]
    tl.store(
        out_ptr + row[None, :] * num_channels + channel[:, None],
        sums.to(out_ptr.dtype.element_ty),
        mask=is_row[None, :] & is_channel[:, None],
    )


def few_rows_kernel(
    rows: Tensor, values: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """(rows x row_scale) (values x scale)^T, (r, out) of `dtype`.

    rows: (r, in) E4M3, few; values: (out, in) E4M3; row_scale: (r, 1); scale: (out); contiguous."""
    num_rows, width = rows.shape
    num_channels = values.shape[0]
    out = torch.empty(num_rows, num_channels, dtype=dtype, device=rows.device)
    _product[(triton.cdiv(num_channels, CHANNELS),)](
        *(rows, values, row_scale, scale, out, num_rows, num_channels),
        width=width,
        padded_rows=max(triton.next_power_of_2(num_rows), LEAST_ROWS),
        channels=CHANNELS,
        depth=DEPTH,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out
