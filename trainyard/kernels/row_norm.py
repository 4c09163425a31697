"""RMSNorm of a few rows in a step of generation, their cast to E4M3, or both: one link of a chain
of dependent launches, in place of torch's `rms_norm` and casts. r rows, c channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.dependent_launch import begin

CHANNELS_OF_WARP = 512
LARGEST = tl.constexpr(448.0)
"""Of E4M3."""


@triton.jit
def _rows(
    x_ptr,
    gain_ptr,
    out_ptr,
    scale_ptr,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    has_gain: tl.constexpr,
    casts: tl.constexpr,
    dependent: tl.constexpr,
):
    row, channel = tl.program_id(0), tl.arange(0, block)
    inside = channel < width
    if has_gain:
        gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if dependent:
        begin()
    x = tl.load(x_ptr + row * width + channel, mask=inside, other=0.0)
    exact = x.to(tl.float32)
    if has_gain:
        exact = exact * tl.rsqrt(tl.sum(exact * exact, 0) / width + eps) * gain
    if casts:
        exact = exact.to(x.dtype).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(exact), 0), 1e-12) / LARGEST
        tl.store(scale_ptr + row, scale)
        exact = exact / scale
    tl.store(out_ptr + row * width + channel, exact.to(out_ptr.dtype.element_ty), mask=inside)


def row_norm(
    x: Tensor,
    out: Tensor,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    scale: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """out = gain x / rms(x) / scale for each row, each part if it is there.

    x, out: (r, c); gain: (c); scale: (r) fp32, computed here, so that E4M3 holds the largest.
    Contiguous."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _rows[(rows,)](
        *(x, x if gain is None else gain, out, x if scale is None else scale, eps),
        width=width,
        block=block,
        has_gain=gain is not None,
        casts=scale is not None,
        dependent=dependent,
        num_warps=min(max(block // CHANNELS_OF_WARP, 4), 16),
        **({"launch_pdl": True} if dependent else {}),
    )
