"""The backward pass of LayerNorm and RMSNorm, in place of torch's: reads each input once, and adds
the gradient that arrives by the residual stream.

A program takes every n-th tile of rows, adds up the gradients of gain and bias over them in fp32,
and leaves both as a row of partial sums; a second kernel adds these rows up. The order is fixed, so
results are reproducible. Mean and deviation are computed again from the row.

r rows, c channels, n programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Launch(NamedTuple):
    """How rows of a width are computed."""

    tile: int
    """Rows that a program holds at once."""
    warps: int
    """At most channels / 256: then a thread has the same channels of all rows of a tile."""
    programs: int
    """Per multiprocessor."""
    stages: int = 1
    """Tiles in flight."""
    twice: bool = False
    """Read a row again after its sums, from the cache: registers cannot hold it."""


LAUNCHES = {
    512: Launch(tile=1, warps=2, programs=8, stages=3),
    1024: Launch(tile=1, warps=4, programs=6, stages=3),
    2048: Launch(tile=1, warps=8, programs=3, stages=3),
    4096: Launch(tile=1, warps=16, programs=1, stages=3),
    8192: Launch(tile=1, warps=16, programs=1, stages=3),
    16384: Launch(tile=1, warps=16, programs=1, twice=True),
}
"""By the next power of two of the channels."""
REGISTERS = 128
"""Of a thread of 16 warps; the assembler takes fewer where these do not suffice."""
PARTIAL_ROWS, PARTIAL_CHANNELS = 128, 32
"""Block of partial sums that the second kernel reads at once."""


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _backward(
    grad_ptr, stream_ptr, x_ptr, gain_ptr, out_ptr, partial_ptr, rows, eps, width: tl.constexpr,
    is_layer_norm: tl.constexpr, has_stream: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    stages: tl.constexpr, twice: tl.constexpr,
):  # fmt: skip
    """partial: (1 or 2, n, c) fp32, of gain and bias. stream: the gradient to add, or None."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    channel = tl.arange(0, block)
    inside = channel < width
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = tl.arange(0, tile)[:, None] * width + channel[None, :]
    gain_grad = tl.zeros((block,), tl.float32)
    bias_grad = tl.zeros((block,), tl.float32)
    for first in tl.range(program * tile, rows, programs * tile, num_stages=stages):
        start = tl.cast(first, tl.int64) * width
        mask = (first + tl.arange(0, tile) < rows)[:, None] & inside[None, :]
        if twice:
            gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = tl.load(x_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
        if has_stream and not twice:
            stream = tl.load(stream_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
        of_norm = grad * gain
        if is_layer_norm:
            mean = tl.sum(x, 1) / width
            x = tl.where(inside[None, :], x - mean[:, None], 0.0)
            squares, along, shift = tl.reduce((x * x, of_norm * x, of_norm), 1, _add_three)
        else:
            squares, along = tl.reduce((x * x, of_norm * x), 1, _add_two)
        scale = tl.rsqrt(squares / width + eps)
        if twice:  # another policy, or the compiler would keep what the first loads got
            gain = tl.load(
                gain_ptr + channel, mask=inside, other=0.0, eviction_policy="evict_last"
            ).to(tl.float32)[None, :]
            x = tl.load(x_ptr + start + at, mask=mask, other=0.0, eviction_policy="evict_first")
            grad = tl.load(
                grad_ptr + start + at, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            x, grad = x.to(tl.float32), grad.to(tl.float32)
            of_norm = grad * gain
            if is_layer_norm:
                x = tl.where(inside[None, :], x - mean[:, None], 0.0)
            if has_stream:
                stream = tl.load(stream_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
        x *= scale[:, None]
        of_x = of_norm - x * (along * scale / width)[:, None]
        if is_layer_norm:
            of_x -= (shift / width)[:, None]
            bias_grad += tl.sum(grad, 0)
        of_x *= scale[:, None]
        if has_stream:
            of_x += stream
        tl.store(out_ptr + start + at, of_x.to(out_ptr.dtype.element_ty), mask=mask)
        gain_grad += tl.sum(grad * x, 0)
    of_gain = partial_ptr + program * width + channel
    tl.store(of_gain, gain_grad, mask=inside)
    if is_layer_norm:
        tl.store(of_gain + programs * width, bias_grad, mask=inside)


@triton.jit
def _add_up(
    partial_ptr, gain_ptr, bias_ptr, num_rows, width, rows: tl.constexpr, channels: tl.constexpr
):
    """gain, bias: (c), where the sums go. partial: as above, `num_rows` of each."""
    channel = tl.program_id(0) * channels + tl.arange(0, channels)
    of_bias = tl.program_id(1)
    inside = channel < width
    total = tl.zeros((rows, channels), tl.float32)
    for first in range(0, num_rows, rows):
        row = first + tl.arange(0, rows)
        at = (of_bias * num_rows + row)[:, None] * width + channel[None, :]
        mask = (row < num_rows)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + at, mask=mask, other=0.0)
    out_ptr = bias_ptr if of_bias else gain_ptr
    tl.store(out_ptr + channel, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=inside)


def norm_backward(
    grad: Tensor,
    stream: Tensor | None,
    x: Tensor,
    gain: Tensor,
    eps: float,
    is_layer_norm: bool,
    launch: Launch | None = None,
) -> list[Tensor]:
    """Gradients of x, gain and, for LayerNorm, bias, each in the dtype of x or gain, rounded once.

    grad: of the norm (..., c); stream: what is added to the gradient of x, of its shape. launch:
    unset: the one for this width."""
    grad, x, gain = grad.contiguous(), x.contiguous(), gain.contiguous()
    stream = None if stream is None else stream.contiguous()
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    launch = launch or LAUNCHES[block]
    programs = launch.programs * _processors(x.device)
    programs = max(min(programs, triton.cdiv(rows, launch.tile)), 1)
    of_x = torch.empty_like(x)
    sums = [torch.empty_like(gain) for _ in range(1 + is_layer_norm)]
    partial = x.new_empty((len(sums), programs, width), dtype=torch.float32)
    _backward[(programs,)](
        *(grad, stream, x, gain, of_x, partial, rows, eps),
        width=width,
        is_layer_norm=is_layer_norm,
        has_stream=stream is not None,
        block=block,
        tile=launch.tile,
        stages=launch.stages,
        twice=launch.twice,
        num_warps=launch.warps,
        maxnreg=REGISTERS if launch.twice else None,
    )
    _add_up[(triton.cdiv(width, PARTIAL_CHANNELS), len(sums))](
        *(partial, sums[0], sums[-1], programs, width),
        rows=PARTIAL_ROWS,
        channels=PARTIAL_CHANNELS,
        num_warps=4,
    )
    return [of_x, *sums]


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
