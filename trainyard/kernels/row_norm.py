"""What stands in front of a product in a step of generation, if no product before computes it: the
RMSNorm of rows of 16 bits, or the cast of the first rows to 8. Links of a chain of dependent
launches. r rows, c channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.decode_product import CAST_CHANNELS, Cast, cast_part
from trainyard.kernels.dependent_launch import begin

CHANNELS_OF_WARP, ROWS_OF_PROGRAM = 512, 16


@triton.jit
def _normed(
    x_ptr, gain_ptr, out_ptr, eps, width: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr
):
    row, channel = tl.program_id(0), tl.arange(0, block)
    inside = channel < width
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if dependent:
        begin()
    x = tl.load(x_ptr + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * gain
    tl.store(out_ptr + row * width + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _cast(
    x_ptr,
    gain_ptr,
    values_ptr,
    scale_ptr,
    squares_ptr,
    num_rows,
    num_channels,
    rows: tl.constexpr,
    channels: tl.constexpr,
    dependent: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1) * rows + tl.arange(0, rows)
    channel, is_row = part * channels + tl.arange(0, channels), row < num_rows
    gain = tl.load(gain_ptr + channel).to(tl.float32)
    if dependent:
        begin()
    at = row[:, None] * num_channels + channel[None, :]
    x = tl.load(x_ptr + at, mask=is_row[:, None], other=0.0).to(tl.float32)
    of_part = part * num_rows + row
    cast_part(
        x,
        gain,
        values_ptr + at,
        scale_ptr + of_part,
        squares_ptr + of_part,
        is_row[:, None],
        is_row,
        has_gain=True,
    )


def row_norm(x: Tensor, gain: Tensor, out: Tensor, *, eps: float, dependent: bool = False) -> None:
    """out = gain x / rms(x) for each row. x, out: (r, c); gain: (c). Contiguous."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _normed[(rows,)](
        *(x, gain, out, eps),
        width=width,
        block=block,
        dependent=dependent,
        num_warps=min(max(block // CHANNELS_OF_WARP, 4), 16),
        **({"launch_pdl": True} if dependent else {}),
    )


def cast_rows(x: Tensor, cast: Cast, *, dependent: bool = False) -> None:
    """Rows (r, c) of 16 bits as a product with `cast` would leave them; contiguous."""
    rows, width = x.shape
    at_once = min(triton.next_power_of_2(rows), ROWS_OF_PROGRAM)
    _cast[(width // CAST_CHANNELS, triton.cdiv(rows, at_once))](
        *(x, cast.gain, *cast[:2], cast.squares, rows, width),
        rows=at_once,
        channels=CAST_CHANNELS,
        dependent=dependent,
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )
