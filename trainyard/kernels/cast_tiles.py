"""The cast of a bf16 matrix to 8 bits with a scale for each 128 numbers or each block of 128 x 128:
one read, both layouts and their scales written. In place of `fp8.blockwise.cast_both`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8
EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def _scales_of(largest, limit: tl.constexpr, smallest: tl.constexpr, tile: tl.constexpr):
    exact = tl.div_rn(tl.full((tile,), limit, tl.float32), tl.maximum(largest, smallest))
    scale = (exact.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return scale, tl.div_rn(tl.full((tile,), 1.0, tl.float32), scale)


@triton.jit
def _cast_block(
    x_ptr,
    rows_ptr,
    columns_ptr,
    row_scale_ptr,
    column_scale_ptr,
    m,
    k,
    stride,
    row_scale_stride,
    column_scale_stride,
    blocks: tl.constexpr,
    limit: tl.constexpr,
    smallest: tl.constexpr,
    tile: tl.constexpr,
):
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    down, across = i * tile + tl.arange(0, tile), j * tile + tl.arange(0, tile)
    x = tl.load(x_ptr + down[:, None] * stride + across[None, :]).to(tl.float32)
    scale, inverse = _scales_of(tl.max(tl.abs(x), axis=1), limit, smallest, tile)
    kind = rows_ptr.dtype.element_ty
    if blocks:  # the scale of the largest number is the least
        cast = (x * tl.min(scale, axis=0)).to(kind)
        columns = tl.trans(cast)
        largest = tl.max(inverse, axis=0)
        tl.store(row_scale_ptr + i * row_scale_stride + j, largest)
        tl.store(column_scale_ptr + j * column_scale_stride + i, largest)
    else:
        cast = (x * scale[:, None]).to(kind)
        tl.store(row_scale_ptr + j * row_scale_stride + down, inverse)
        scale, inverse = _scales_of(tl.max(tl.abs(x), axis=0), limit, smallest, tile)
        columns = tl.trans((x * scale[None, :]).to(kind))
        tl.store(column_scale_ptr + i * column_scale_stride + across, inverse)
    tl.store(rows_ptr + down[:, None] * k + across[None, :], cast)
    tl.store(columns_ptr + across[:, None] * m + down[None, :], columns)


def cast_tiles(
    x: Tensor,
    rows: Tensor,
    columns: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    *,
    tile: int,
    smallest: float,
    blocks: bool,
) -> None:
    """Fill the others from x (m, k), bf16, whose sizes are multiples of `tile`. smallest: least
    maximum that counts."""
    if x.stride(1) != 1:
        x = x.contiguous()
    m, k = x.shape
    _cast_block[(m // tile, k // tile)](
        *(x, rows, columns, row_scale, column_scale, m, k, x.stride(0)),
        *(row_scale.stride(0), column_scale.stride(0)),
        blocks=blocks,
        limit=torch.finfo(rows.dtype).max,
        smallest=smallest,
        tile=tile,
        num_warps=WARPS,
    )
