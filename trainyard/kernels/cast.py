"""The cast of a matrix to 8 bits: one read, both layouts written. In place of
`(x * scale).clamp(...).to(dtype)` and its transpose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_K, WARPS = 128, 64, 4


@triton.jit
def _cast_both(
    x_ptr,
    scale_ptr,
    rows_ptr,
    columns_ptr,
    m,
    k,
    stride,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
):
    down = (tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    across = (tl.program_id(1) * block_k + tl.arange(0, block_k)).to(tl.int64)
    inside = (down[:, None] < m) & (across[None, :] < k)
    scale = tl.load(scale_ptr)
    x = tl.load(x_ptr + down[:, None] * stride + across[None, :], mask=inside).to(tl.float32)
    scaled = tl.maximum(x * scale, -limit, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, limit, propagate_nan=tl.PropagateNan.ALL)
    cast = scaled.to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + down[:, None] * k + across[None, :], cast, mask=inside)
    inside = (across[:, None] < k) & (down[None, :] < m)
    tl.store(columns_ptr + across[:, None] * m + down[None, :], tl.trans(cast), mask=inside)


def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (m, k) times `scale` () fp32, saturated: in `dtype`, (m, k) and (k, m)."""
    if x.stride(1) != 1:
        x = x.contiguous()
    m, k = x.shape
    rows = torch.empty((m, k), dtype=dtype, device=x.device)
    columns = torch.empty((k, m), dtype=dtype, device=x.device)
    _cast_both[(triton.cdiv(m, BLOCK_M), triton.cdiv(k, BLOCK_K))](
        *(x, scale, rows, columns, m, k, x.stride(0)),
        limit=torch.finfo(dtype).max,
        block_m=BLOCK_M,
        block_k=BLOCK_K,
        num_warps=WARPS,
    )
    return rows, columns
