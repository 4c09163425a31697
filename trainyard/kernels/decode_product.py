"""The product of a few rows with a matrix in a step of generation, with what stands around it: the
norm of the rows before it, SwiGLU or the residual stream behind it, and the cast of the result to
8 bits for the next product.

Such a product takes as long as reading the matrix. So all processors read at once, parts of the
depth are shared out among programs where there are few channels, and a program begins to fetch its
part of the matrix while the kernel before ends. A program casts its own channels of a row by their
own maximum, and a norm's factor is applied behind the product, so no kernel has to see a whole row.
r rows, "in" and "out" sizes of the matrix."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.dependent_launch import begin, prefetch

LEAST_ROWS, MATRIX_ROWS = 16, tl.constexpr(64)
"""Of a product: fewer are padded. Up to the first, channels of the matrix are the rows of what a
matrix unit multiplies, with more the rows themselves: each thread then needs the factors of two."""
NARROW, VOCABULARY = 6144, 2**15
"""Channels below which programs share the depth, and from which the matrix is a vocabulary's."""
MOST_SPLITS, LEAST_CHANNELS = 4, 64
"""Of a depth, and of a program."""
CAST_CHANNELS = 128
"""Of a row that share a factor, and of a program that casts."""
LARGEST = tl.constexpr(448.0)
"""Of E4M3."""


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
    ahead: int = 0
    """Numbers of each channel that are fetched while the kernel before ends; 0: of one read."""


class Rows(NamedTuple):
    """The rows, as a product takes them."""

    values: Tensor
    """(r, in) of the type of the matrix."""
    scale: Tensor | None = None
    """(parts, r) fp32 factors of as many equal parts of a row, of 8 bits."""
    gain: Tensor | None = None
    """(in) of an RMSNorm that is to be applied; not with `scale`."""
    eps: float = 0.0
    """Of a norm."""
    squares: Tensor | None = None
    """(parts, r) fp32 sums of squares of parts of a row, if it is to be divided by its root mean
    square: an RMSNorm whose gain the values have already."""


class Cast(NamedTuple):
    """Where a result goes in 8 bits, as `Rows` of the next product."""

    values: Tensor
    """(r, out) E4M3"""
    scale: Tensor
    """(out / CAST_CHANNELS, r) fp32"""
    gain: Tensor | None = None
    """(out) of an RMSNorm in front of the next product."""
    squares: Tensor | None = None
    """As `scale`, of what has not been multiplied by `gain`."""

    def rows(self, eps: float = 0.0) -> Rows:
        """eps: of that norm."""
        return Rows(self.values, self.scale, eps=eps, squares=self.squares)


@triton.jit
def cast_part(x, gain, values_at, scale_at, squares_at, mask, is_row, has_gain: tl.constexpr):
    """Write rows of one part, (r, channels) fp32, in 8 bits, with their factors and, if the gain of
    a norm is given, sums of squares."""
    if has_gain:
        tl.store(squares_at, tl.sum(x * x, 1), mask=is_row)
        x *= gain[None, :]
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / LARGEST
    tl.store(scale_at, scale, mask=is_row)
    tl.store(values_at, (x / scale[:, None]).to(values_at.dtype.element_ty), mask=mask)


@triton.jit
def _added(sums, x, weight, x_scale, has_scale: tl.constexpr, precision: tl.constexpr):
    """sums + x W^T, or its transpose for few rows; x_scale: of each row."""
    few: tl.constexpr = x.shape[0] < MATRIX_ROWS
    if few and has_scale:
        sums += tl.dot(weight, tl.trans(x)) * x_scale[None, :]
    elif few:
        sums = tl.dot(weight, tl.trans(x), sums, input_precision=precision)
    elif has_scale:
        sums += tl.dot(x, tl.trans(weight)) * x_scale[:, None]
    else:
        sums = tl.dot(x, tl.trans(weight), sums, input_precision=precision)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr,
    x_scale_ptr,
    squares_ptr,
    gain_ptr,
    weight_ptr,
    scale_ptr,
    residual_ptr,
    out_ptr,
    cast_ptr,
    cast_scale_ptr,
    cast_gain_ptr,
    cast_squares_ptr,
    parts_ptr,
    done_ptr,
    num_rows,
    num_channels,
    eps,
    width: tl.constexpr,
    scaled_part: tl.constexpr,
    squared_parts: tl.constexpr,
    padded_rows: tl.constexpr,
    channels: tl.constexpr,
    depth: tl.constexpr,
    ahead: tl.constexpr,
    stages: tl.constexpr,
    splits: tl.constexpr,
    has_scale: tl.constexpr,
    has_gain: tl.constexpr,
    has_residual: tl.constexpr,
    has_out: tl.constexpr,
    casts: tl.constexpr,
    has_cast_gain: tl.constexpr,
    gated: tl.constexpr,
    precision: tl.constexpr,
    dependent: tl.constexpr,
):
    split, tile = tl.program_id(0), tl.program_id(1)
    channel = tile * channels + tl.arange(0, channels)
    row, number = tl.arange(0, padded_rows), tl.arange(0, depth)
    is_row = row < num_rows
    # Of programs that share a depth, each ends with some of the rows.
    own_rows: tl.constexpr = padded_rows // splits
    out_row = split * own_rows + tl.arange(0, own_rows)
    is_out = out_row < num_rows
    own: tl.constexpr = width // splits
    begin_at = split * own
    weight_at = weight_ptr + channel.to(tl.int64)[:, None] * width
    up_at = weight_at + num_channels.to(tl.int64) * width
    if dependent:
        line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        for far in tl.static_range(0, ahead, line):
            prefetch(weight_at + (begin_at + far))
            if gated:
                prefetch(up_at + (begin_at + far))
        begin()
    weight_at += number[None, :]
    up_at += number[None, :]
    x_at = x_ptr + row[:, None] * width + number[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    squares = tl.zeros((own_rows,), tl.float32)
    if squared_parts > 0:
        part = tl.arange(0, squared_parts)[:, None]
        inside = is_out[None, :] & (part * scaled_part < width)
        of_parts = tl.load(squares_ptr + part * num_rows + out_row[None, :], mask=inside, other=0.0)
    if padded_rows < MATRIX_ROWS:
        sums = tl.zeros((channels, padded_rows), tl.float32)
    else:
        sums = tl.zeros((padded_rows, channels), tl.float32)
    ups = sums
    for first in tl.range(begin_at, begin_at + own, depth, num_stages=stages):
        weight = tl.load(weight_at + first, eviction_policy="evict_first")
        x = tl.load(x_at + first, mask=is_row[:, None], other=0.0)
        if has_gain:
            exact = x.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            gain = tl.load(gain_ptr + first + number).to(tl.float32)
            x = (exact * gain[None, :]).to(dtype)
        x_scale = row
        if has_scale:
            x_scale = tl.load(
                x_scale_ptr + first // scaled_part * num_rows + row, mask=is_row, other=0.0
            )
        sums = _added(sums, x, weight, x_scale, has_scale, precision)
        if gated:
            up = tl.load(up_at + first, eviction_policy="evict_first")
            ups = _added(ups, x, up, x_scale, has_scale, precision)
    if padded_rows < MATRIX_ROWS:
        sums, ups = tl.trans(sums), tl.trans(ups)
    place = out_row[:, None] * num_channels + channel[None, :]
    if splits > 1:  # without SwiGLU, and without a norm of its own
        size = num_rows * num_channels
        part_at = parts_ptr + row[:, None] * num_channels + channel[None, :]
        tl.store(part_at + split * size, sums, mask=is_row[:, None])
        tl.debug_barrier()
        # Programs that share a tile have neighbouring numbers (the first axis of the grid), at most
        # MOST_SPLITS. GPUs start programs in the order of their numbers, which CUDA does not
        # promise: of a tile that waits here all run, or start as soon as another tile ends.
        arrived = tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") + 1
        while arrived < splits:
            arrived = tl.atomic_add(done_ptr + tile, 0, sem="acquire")
        sums = tl.zeros((own_rows, channels), tl.float32)
        for other in tl.static_range(splits):
            sums += tl.load(
                parts_ptr + other * size + place,
                mask=is_out[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
        if tl.atomic_add(done_ptr + tile, 1, sem="relaxed") == 2 * splits - 1:
            tl.store(done_ptr + tile, 0)
    if has_scale:
        sums *= tl.load(scale_ptr + channel)[None, :]
        if gated:
            ups *= tl.load(scale_ptr + num_channels + channel)[None, :]
    if squared_parts > 0:
        squares = tl.sum(of_parts, 0)
    if has_gain or squared_parts > 0:
        factor = tl.rsqrt(squares / width + eps)
        sums *= factor[:, None]
        if gated:
            ups *= factor[:, None]
    result: tl.constexpr = out_ptr.dtype.element_ty if has_out else tl.bfloat16
    out = sums.to(result)
    if gated:  # rounded as torch's operators round
        gate = out.to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(result).to(tl.float32)
        out = (silu * ups.to(result).to(tl.float32)).to(result)
    if has_residual:
        out += tl.load(residual_ptr + place, mask=is_out[:, None], other=0.0)
    if has_out:
        tl.store(out_ptr + place, out, mask=is_out[:, None])
    if casts:
        next_gain = channel.to(tl.float32)
        if has_cast_gain:
            next_gain = tl.load(cast_gain_ptr + channel).to(tl.float32)
        cast_part(
            out.to(tl.float32),
            next_gain,
            cast_ptr + place,
            cast_scale_ptr + tile * num_rows + out_row,
            cast_squares_ptr + tile * num_rows + out_row,
            is_out[:, None],
            is_out,
            has_gain=has_cast_gain,
        )


class Meeting:
    """Memory in which programs that share a depth meet, for products of one chain."""

    def __init__(self, num_rows: int, most_channels: int, device: torch.device) -> None:
        most_channels = min(most_channels, NARROW)  # with more, nothing is shared
        self.parts = torch.empty(MOST_SPLITS * num_rows * most_channels, device=device)
        self.done = torch.zeros(most_channels // LEAST_CHANNELS, dtype=torch.int32, device=device)


def decode_product(
    rows: Rows,
    weight: Tensor,
    out: Tensor | None,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    cast: Cast | None = None,
    meeting: Meeting,
    block: Block | None = None,
    dependent: bool = False,
) -> None:
    """out = residual + activation(norm(x) W^T), each part if it is there; the same to `cast`.

    weight: (out, in), (2 out, in) if `gated`, which is SwiGLU; scale: (out) fp32 factors of the
    rows of E4M3; residual, out: (r, out), may be one tensor; out: None, if only `cast` is wanted,
    of bf16; cast: for a matrix of E4M3. All contiguous. dependent: launched while the kernel before
    ends."""
    x = rows.values
    num_rows, width = x.shape
    num_channels = weight.shape[0] // (2 if gated else 1)
    parts = 1 if rows.scale is None else rows.scale.shape[0]
    block = block or block_of(rows, num_channels, gated=gated, casts=cast is not None)
    of_rows = (rows.scale, rows.squares, rows.gain)
    of_cast = (None,) * 4 if cast is None else (cast.values, cast.scale, cast.gain, cast.squares)
    pointers = (*of_rows, weight, scale, residual, out, *of_cast)
    _product[(block.splits, num_channels // block.channels)](
        x,
        *(x if pointer is None else pointer for pointer in pointers),
        *(meeting.parts, meeting.done, num_rows, num_channels, rows.eps),
        width=width,
        scaled_part=width // parts,
        squared_parts=0 if rows.squares is None else triton.next_power_of_2(parts),
        padded_rows=LEAST_ROWS if num_rows <= LEAST_ROWS else MATRIX_ROWS.value,
        channels=block.channels,
        depth=block.depth,
        ahead=min(block.ahead or block.depth, width // block.splits),
        stages=block.stages,
        splits=block.splits,
        has_scale=scale is not None,
        has_gain=rows.gain is not None,
        has_residual=residual is not None,
        has_out=out is not None,
        casts=cast is not None,
        has_cast_gain=cast is not None and cast.gain is not None,
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
        narrow=Block(128, 128, 4, 7, splits=4, ahead=256),
        plain=Block(64, 128, 4, 12, ahead=512),
        gated=Block(128, 128, 8, 4),
        long=Block(128, 128, 4, 6),
    ),
    (1, False): Blocks(
        narrow=Block(128, 128, 8, 5, splits=4, ahead=256),
        plain=Block(64, 128, 4, 8, ahead=512),
        gated=Block(128, 128, 8, 4),
        long=Block(128, 128, 8, 4),
    ),
    (2, True): Blocks(
        Block(64, 256, 4, 3, 2), Block(64, 256, 4, 3), Block(64, 256, 4, 3), Block(128, 128, 8, 3)
    ),
    (2, False): Blocks(
        Block(64, 128, 4, 4, 2), Block(64, 128, 4, 4), Block(64, 128, 4, 4), Block(128, 128, 8, 3)
    ),
}
"""By the bytes of a number, and whether there are at most `LEAST_ROWS` rows."""


def block_of(rows: Rows, num_channels: int, *, gated: bool, casts: bool) -> Block:
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
    if casts:
        block = block._replace(channels=CAST_CHANNELS)
    elif num_channels % block.channels:
        block = block._replace(channels=LEAST_CHANNELS, warps=4)
    most_depth = width if rows.scale is None else width // rows.scale.shape[0]
    depth, splits = math.gcd(block.depth, most_depth), block.splits
    while width % (splits * depth):
        splits //= 2
    return block._replace(depth=depth, splits=splits)
