"""Matrix products of 8-bit tensors: tensor cores on a GPU, the same numbers multiplied in fp32 on a
CPU."""

from __future__ import annotations

import torch
from torch import Tensor


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

    fast: add up in the tensor cores' own registers, with fewer bits; forward passes bear it."""
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
