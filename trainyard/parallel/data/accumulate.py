"""Puts the gradient of one backward pass into the sum of a step."""

from __future__ import annotations

from torch import Tensor

from trainyard.kernels.available import TRITON


def put_gradient(total: Tensor, grad: Tensor, *, is_first: bool) -> None:
    """Overwrite `total` with `grad`, or add it; they may differ in dtype.

    torch's kernels for two dtypes run at less than half the bandwidth of a GPU."""
    if TRITON and total.is_cuda and total.dtype != grad.dtype and grad.is_contiguous():
        from trainyard.kernels.accumulate import accumulate

        accumulate(total, grad, is_first=is_first)
    elif is_first:
        total.copy_(grad)
    else:
        total.add_(grad)
