"""Matrix products of 8-bit tensors: tensor cores on a GPU, the same numbers multiplied in fp32 on a
CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from trainyard.fp8.blockwise import decode, is_of_blocks


def scaled_product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """a b^T in `dtype`, plus bias. a: (m, k), b: (n, k), both 8 bits, k innermost. Returns (m, n).

    inverse_a, inverse_b: both of whole tensors, of rows, or of parts (blockwise.py): then a has
    tiles, and b tiles or blocks. fast: accumulate in the tensor cores with fewer bits, precise
    enough for forward passes; no effect on scales of parts."""
    if inverse_a.ndim == 2:
        of_parts: Tensor = _blockwise_op(a, b, inverse_a, inverse_b, dtype)
        return of_parts if bias is None else of_parts + bias
    if inverse_a.ndim == 1:
        inverse_a, inverse_b = inverse_a.unsqueeze(1), inverse_b.unsqueeze(0)
    if a.is_cuda:
        out: Tensor = torch._scaled_mm(
            a,
            b.t(),
            scale_a=inverse_a,
            scale_b=inverse_b,
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
        return out
    product = (a.float() @ b.float().t()) * (inverse_a * inverse_b)
    return (product if bias is None else product + bias.float()).to(dtype)


def _blockwise(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype
) -> Tensor:
    if not a.is_cuda:
        return (decode(a, inverse_a) @ decode(b, inverse_b).t()).to(dtype)
    from torch.nn.functional import ScalingType, scaled_mm

    tiles, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    out: Tensor = scaled_mm(
        *(a, b.t(), inverse_a.t(), tiles, inverse_b.t()),
        blocks if is_of_blocks(b, inverse_b) else tiles,
        output_dtype=dtype,
    )
    return out


# One operation for a compiler, which cannot trace the choice of scales.
_blockwise_op = torch.library.custom_op(
    "trainyard::fp8_blockwise_product", _blockwise, mutates_args=()
)


@_blockwise_op.register_fake
def _(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
