"""Matrices in 8 bits with a scale for each 128 numbers, or for each block of 128 x 128.

The recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and of Transformer Engine's
Float8BlockScaling: inputs and gradients in tiles of 1 x 128 along the dim that a product sums over,
weights in blocks of 128 x 128. Scales are powers of two, the default there: they round nothing.

Scales lie as cuBLAS reads them (its 1D and 2D block scaling of FP8): those of tiles of (m, k) as
(k / 128, m), those of blocks as (m / 128, k / 128), filled up with zeros to a multiple of 4
columns."""

from __future__ import annotations

import torch
from torch import Tensor

from trainyard.fp8.cast import SMALLEST, Fp8Pair, power_of_two_scale
from trainyard.fp8.recipe import TILE
from trainyard.kernels.available import TRITON

SCALES_MULTIPLE = 4
"""Scales of blocks that cuBLAS reads at a time."""


def cast_tiles(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """(m, k) in 8 bits, a scale for each 128 numbers along k in `rows`, along m in `columns`."""
    return Fp8Pair(*_cast_op(x, dtype, False))


def cast_blocks(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """(m, k) in 8 bits, a scale for each block of 128 x 128."""
    return Fp8Pair(*_cast_op(x, dtype, True))


def decode(values: Tensor, inverse_scale: Tensor) -> Tensor:
    """The numbers of a matrix (m, k), rows or columns of a pair, in fp32."""
    m, k = values.shape
    if is_of_blocks(values, inverse_scale):
        blocks = values.float().view(m // TILE, TILE, k // TILE, TILE)
        return (blocks * inverse_scale[:, None, : k // TILE, None]).view(m, k)
    return (values.float().view(m, k // TILE, TILE) * inverse_scale.t().unsqueeze(2)).view(m, k)


def is_of_blocks(values: Tensor, inverse_scale: Tensor) -> bool:
    """Whether a matrix (m, k) has scales of blocks. Those of tiles have another shape in each size:
    m / 128, filled up to a multiple of 4, is less than m."""
    m, k = values.shape
    return inverse_scale.shape != (k // TILE, m)


def _cast(x: Tensor, dtype: torch.dtype, blocks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Of blocks in fp32, which no training casts, Triton 3.6 stored wrong numbers on an H200.
    if TRITON and x.is_cuda and x.dtype == torch.bfloat16:
        from trainyard.kernels import cast_tiles as kernel

        made = new_parts(x, dtype, blocks)
        kernel.cast_tiles(x, *made, tile=TILE, smallest=SMALLEST, blocks=blocks)
        return made
    return cast_both(x, dtype, blocks)


def new_parts(x: Tensor, dtype: torch.dtype, blocks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, columns and the inverse scales of both, to be filled."""
    m, k = x.shape
    make = x.new_zeros if blocks else x.new_empty
    return (
        x.new_empty((m, k), dtype=dtype),
        x.new_empty((k, m), dtype=dtype),
        make(_scales_shape(m, k, blocks), dtype=torch.float32),
        make(_scales_shape(k, m, blocks), dtype=torch.float32),
    )


def _scales_shape(m: int, k: int, blocks: bool) -> tuple[int, int]:
    """Of a matrix (m, k)."""
    if not blocks:
        return k // TILE, m
    return m // TILE, -(-k // TILE // SCALES_MULTIPLE) * SCALES_MULTIPLE


def cast_both(x: Tensor, dtype: torch.dtype, blocks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, columns and the inverse scales of both, by torch's operators."""
    made = new_parts(x, dtype, blocks)
    rows, columns, row_scale, column_scale = made
    fill = _fill_blocks if blocks else _fill_tiles
    fill(x.float(), rows, row_scale)
    fill(x.float().t(), columns, column_scale)
    return made


def _fill_tiles(x: Tensor, values: Tensor, inverse_scale: Tensor) -> None:
    m, k = x.shape
    tiles = x.reshape(m, k // TILE, TILE)
    scale = power_of_two_scale(tiles.abs().amax(2), values.dtype)
    values.copy_((tiles * scale.unsqueeze(2)).view(m, k))
    inverse_scale.copy_(scale.t().reciprocal())


def _fill_blocks(x: Tensor, values: Tensor, inverse_scale: Tensor) -> None:
    m, k = x.shape
    blocks = x.reshape(m // TILE, TILE, k // TILE, TILE)
    scale = power_of_two_scale(blocks.abs().amax((1, 3)), values.dtype)
    values.copy_((blocks * scale[:, None, :, None]).view(m, k))
    inverse_scale[:, : k // TILE] = scale.reciprocal()


# One operation for a compiler, as the cast by one scale.
_cast_op = torch.library.custom_op("trainyard::fp8_cast_blockwise", _cast, mutates_args=())
_cast_op.register_fake(new_parts)
