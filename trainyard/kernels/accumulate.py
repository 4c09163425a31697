"""A sum of gradients in fp32 that takes 16-bit ones, in place of `copy_` and `add_`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def _accumulate(total_ptr, grad_ptr, size, first: tl.constexpr, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < size
    total = tl.load(grad_ptr + places, mask=inside).to(total_ptr.dtype.element_ty)
    if not first:
        total += tl.load(total_ptr + places, mask=inside)
    tl.store(total_ptr + places, total, mask=inside)


def accumulate(total: Tensor, grad: Tensor, *, is_first: bool) -> None:
    """Overwrite `total` with `grad`, or add it; both contiguous, of one shape."""
    size = total.numel()
    _accumulate[(triton.cdiv(size, BLOCK),)](
        total, grad, size, first=is_first, block=BLOCK, num_warps=WARPS
    )
