"""Tensors in 8-bit floating point with a scale, row by row and transposed.

A matrix product in 8 bits takes both operands with the summed dim innermost, so the backward pass
needs each tensor of the forward pass transposed (Hopper tensor cores; torch._scaled_mm). Both forms
are made in one pass over the tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.kernels.available import TRITON

FORWARD = torch.float8_e4m3fn
"""Dtype of activations and weights."""
WIDE = torch.float8_e5m2
"""Dtype with a wider range and one bit less, for gradients."""

EXPONENT = 0x7F800000
"""Bits of an fp32 number that say its power of two."""
SMALLEST = 2.0**-100
"""Maxima below count as this, so that the scale stays finite; a tensor of zeros stays zeros."""


class Fp8Pair(NamedTuple):
    """A matrix (m, k) in 8 bits in both layouts. A stored number times its inverse scale is the
    value."""

    rows: Tensor
    """(m, k), k innermost."""
    columns: Tensor
    """(k, m), m innermost: the transpose."""
    row_scale: Tensor
    """Inverse scale of `rows`, fp32: () for all numbers, (m) for rows, or blockwise.py's."""
    column_scale: Tensor
    """Inverse scale of `columns`."""


def cast_pair(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """(m, k) in 8 bits, scaled so that the largest magnitude is the largest of `dtype`.

    Rounds to nearest even. Infinities and NaN give NaN scales or numbers, so that they reach the
    loss."""
    return cast_scaled(x, scale_of(amax_of(x), dtype), dtype)


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude; () fp32."""
    return x.abs().amax().float()


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What brings a largest magnitude, fp32, to the largest of `dtype`."""
    return torch.finfo(dtype).max / largest.clamp(min=SMALLEST)


def power_of_two_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that brings no magnitude above the largest of `dtype`; fp32."""
    return (scale_of(largest.float(), dtype).view(torch.int32) & EXPONENT).view(torch.float32)


def cast_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """(m, k) in 8 bits, multiplied by a scale, () fp32; what is too large becomes the largest."""
    rows, columns = _cast_op(x, scale, dtype)
    inverse = scale.reciprocal()
    return Fp8Pair(rows, columns, inverse, inverse)


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if TRITON and x.is_cuda:
        from trainyard.kernels.cast import cast_both

        return cast_both(x, scale, dtype)
    limit = torch.finfo(dtype).max
    rows = (x.float() * scale).clamp(-limit, limit).to(dtype).contiguous()
    return rows, rows.t().clone(memory_format=torch.contiguous_format)


# One operation for a compiler, which would otherwise write the transpose in a pass of its own.
_cast_op = torch.library.custom_op("trainyard::fp8_cast", _cast, mutates_args=())


@_cast_op.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    return x.new_empty((m, k), dtype=dtype), x.new_empty((k, m), dtype=dtype)
