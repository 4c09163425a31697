"""The product of a few rows with a matrix in a step of generation, with what stands around it: the
norm of the rows before it, SwiGLU or the residual stream behind it.

Such a product takes as long as reading the matrix. So all processors read at once, parts of the
depth are shared out among programs where there are few channels, and a program begins to fetch its
part of the matrix while the kernel before ends. r rows, "in" and "out" sizes of the matrix."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.dependent_launch import begin, prefetch

LEAST_ROWS = 16
"""Of a product; fewer are padded."""
NARROW, VOCABULARY = 6144, 2**15
"""Channels below which programs share the depth, and from which the matrix is a vocabulary's."""
MOST_SPLITS, LEAST_CHANNELS = 4, 64
"""Of a depth, and of a program."""


class Block(NamedTuple):
    """Sizes of a program."""

    channels: int
    depth: int
    """Numbers of each channel that are read at a time."""
    warps: int
    stages: int
    """Reads under way."""
    splits: int = 1
    """Programs that share the depth of a channel."""


class Rows(NamedTuple):
    """The rows, as a product takes them."""

    values: Tensor
    """(r, in) of the type of the matrix."""
    scale: Tensor | None = None
    """(r, blocks) fp32 factors of as many equal parts of a row, of 8 bits."""
    gain: Tensor | None = None
    """(in) of an RMSNorm that is to be applied; not with `scale`."""
    eps: float = 0.0
    """Of that."""


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr,
    x_scale_ptr,
    gain_ptr,
    weight_ptr,
    scale_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    done_ptr,
    num_rows,
    num_channels,
    eps,
    width: tl.constexpr,
    scaled_block: tl.constexpr,
    padded_rows: tl.constexpr,
    channels: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    splits: tl.constexpr,
    has_scale: tl.constexpr,
    has_gain: tl.constexpr,
    has_residual: tl.constexpr,
    gated: tl.constexpr,
    precision: tl.constexpr,
    dependent: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    channel = tile * channels + tl.arange(0, channels)
    row, number = tl.arange(0, padded_rows), tl.arange(0, depth)
    is_row = row < num_rows
    own: tl.constexpr = width // splits
    begin_at = split * own
    weight_at = weight_ptr + channel.to(tl.int64)[:, None] * width
    up_at = weight_at + num_channels.to(tl.int64) * width
    if dependent:
        line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        lines = begin_at + tl.arange(0, (depth + line - 1) // line)[None, :] * line
        prefetch(weight_at + lines)
        if gated:
            prefetch(up_at + lines)
        begin()
    weight_at += number[None, :]
    up_at += number[None, :]
    x_at = x_ptr + row[:, None] * width + number[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    squares = tl.zeros((padded_rows,), tl.float32)
    sums = tl.zeros((channels, padded_rows), tl.float32)
    ups = sums
    blocks: tl.constexpr = width // scaled_block
    for first in tl.range(begin_at, begin_at + own, depth, num_stages=stages):
        weight = tl.load(weight_at + first, eviction_policy="evict_first")
        x = tl.load(x_at + first, mask=is_row[:, None], other=0.0)
        if has_gain:
            exact = x.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            gain = tl.load(gain_ptr + first + number).to(tl.float32)
            x = (exact * gain[None, :]).to(dtype)
        if blocks > 1:  # without SwiGLU
            x_scale = tl.load(
                x_scale_ptr + row * blocks + first // scaled_block, mask=is_row, other=0.0
            )
            sums += tl.dot(weight, tl.trans(x)) * x_scale[None, :]
        else:
            sums = tl.dot(weight, tl.trans(x), sums, input_precision=precision)
        if gated:
            up = tl.load(up_at + first, eviction_policy="evict_first")
            ups = tl.dot(up, tl.trans(x), ups, input_precision=precision)
    sums, ups = tl.trans(sums), tl.trans(ups)
    place = row[:, None] * num_channels + channel[None, :]
    if splits > 1:  # without SwiGLU and norm
        size = num_rows * num_channels
        tl.store(parts_ptr + split * size + place, sums, mask=is_row[:, None])
        tl.debug_barrier()
        if tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") != splits - 1:
            return
        tl.store(done_ptr + tile, 0)
        sums = tl.load(parts_ptr + place, mask=is_row[:, None], other=0.0)
        for other in tl.static_range(1, splits):
            sums += tl.load(parts_ptr + other * size + place, mask=is_row[:, None], other=0.0)
    if has_scale:
        sums *= tl.load(scale_ptr + channel)[None, :]
        if gated:
            ups *= tl.load(scale_ptr + num_channels + channel)[None, :]
        if blocks == 1:
            x_scale = tl.load(x_scale_ptr + row, mask=is_row, other=0.0)
            sums *= x_scale[:, None]
            ups *= x_scale[:, None]
    if has_gain:
        factor = tl.rsqrt(squares / width + eps)
        sums *= factor[:, None]
        ups *= factor[:, None]
    result: tl.constexpr = out_ptr.dtype.element_ty
    out = sums.to(result)
    if gated:  # rounded as torch's operators round
        gate = out.to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(result).to(tl.float32)
        out = (silu * ups.to(result).to(tl.float32)).to(result)
    if has_residual:
        out += tl.load(residual_ptr + place, mask=is_row[:, None], other=0.0)
    tl.store(out_ptr + place, out, mask=is_row[:, None])


class Meeting:
    """Memory in which programs that share a depth meet, for products of one chain."""

    def __init__(self, num_rows: int, most_channels: int, device: torch.device) -> None:
        most_channels = min(most_channels, NARROW)  # with more, nothing is shared
        self.parts = torch.empty(MOST_SPLITS * num_rows * most_channels, device=device)
        self.done = torch.zeros(most_channels // LEAST_CHANNELS, dtype=torch.int32, device=device)


def decode_product(
    rows: Rows,
    weight: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    meeting: Meeting,
    block: Block | None = None,
    dependent: bool = False,
) -> None:
    """out = residual + activation(norm(x) W^T), each part if it is there.

    weight: (out, in), (2 out, in) if `gated`, which is SwiGLU; scale: (out) fp32 factors of the
    rows of E4M3; residual, out: (r, out), may be one tensor. All contiguous. dependent: launched
    while the kernel before ends."""
    x = rows.values
    num_rows, width = x.shape
    num_channels = weight.shape[0] // (2 if gated else 1)
    parts = 1 if rows.scale is None else rows.scale.numel() // num_rows
    block = block or block_of(rows, num_channels, gated=gated)
    _product[(num_channels // block.channels, block.splits)](
        *(x, x if rows.scale is None else rows.scale, x if rows.gain is None else rows.gain),
        *(weight, x if scale is None else scale, out if residual is None else residual, out),
        *(meeting.parts, meeting.done, num_rows, num_channels, rows.eps),
        width=width,
        scaled_block=width // parts,
        padded_rows=max(triton.next_power_of_2(num_rows), LEAST_ROWS),
        channels=block.channels,
        depth=block.depth,
        stages=block.stages,
        splits=block.splits,
        has_scale=scale is not None,
        has_gain=rows.gain is not None,
        has_residual=residual is not None,
        gated=gated,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        dependent=dependent,
        num_warps=block.warps,
        **({"launch_pdl": True} if dependent else {}),
    )


class Blocks(NamedTuple):
    """The fastest of those tried on an H200 in a chain of layers, by the kind of product."""

    narrow: Block
    """Few channels: programs share the depth."""
    plain: Block
    gated: Block
    long: Block
    """A vocabulary."""


BLOCKS = {
    (1, True): Blocks(
        Block(64, 256, 4, 4, 4), Block(64, 512, 4, 3), Block(64, 256, 4, 3), Block(128, 256, 8, 3)
    ),
    (1, False): Blocks(
        Block(64, 256, 4, 3, 4), Block(64, 128, 4, 6), Block(128, 128, 8, 3), Block(128, 128, 8, 4)
    ),
    (2, True): Blocks(
        Block(64, 256, 4, 3, 2), Block(64, 256, 4, 3), Block(64, 256, 4, 3), Block(128, 128, 8, 3)
    ),
    (2, False): Blocks(
        Block(64, 128, 4, 4, 2), Block(64, 128, 4, 4), Block(64, 128, 4, 4), Block(128, 128, 8, 3)
    ),
}
"""By the bytes of a number, and whether there are at most `LEAST_ROWS` rows."""


def block_of(rows: Rows, num_channels: int, *, gated: bool) -> Block:
    """The sizes for a product."""
    num_rows, width = rows.values.shape
    blocks = BLOCKS[min(rows.values.element_size(), 2), num_rows <= LEAST_ROWS]
    block = blocks.plain
    if gated:
        block = blocks.gated
    elif num_channels >= VOCABULARY:
        block = blocks.long
    elif num_channels < NARROW and rows.gain is None:
        block = blocks.narrow
    if num_channels % block.channels:
        block = block._replace(channels=LEAST_CHANNELS, warps=4)
    most_depth = width if rows.scale is None else width * num_rows // rows.scale.numel()
    depth, splits = math.gcd(block.depth, most_depth), block.splits
    while width % (splits * depth):
        splits //= 2
    return block._replace(depth=depth, splits=splits)
