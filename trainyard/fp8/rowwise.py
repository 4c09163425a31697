"""Matrices in 8 bits with a scale for each row, and for each row of the transpose: torchao's
recipe `rowwise`. Its scales are powers of two, as there, so that both round alike."""

from __future__ import annotations

import torch
from torch import Tensor

from trainyard.fp8.cast import Fp8Pair, power_of_two_scale


def cast_rows(x: Tensor, dtype: torch.dtype) -> Fp8Pair:
    """(m, k) in 8 bits; inverse scales (m) of `rows` and (k) of `columns`. A compiler fuses it."""
    rows, row_scale = _cast(x, dtype)
    columns, column_scale = _cast(x.t(), dtype)
    return Fp8Pair(rows, columns, row_scale, column_scale)


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = power_of_two_scale(x.abs().amax(1), dtype)
    return (x.float() * scale.unsqueeze(1)).to(dtype).contiguous(), scale.reciprocal()
