"""The norm of the whole model's gradient, and its bound."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before dividing by it, as Megatron-LM does."""


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all tensors together, fp32, on their device.

    Tensor by tensor, then over tensors: independent of how gradients lie in buckets. Data-parallel
    ranks hold the same gradients, so they get the same bits."""
    norms = torch._foreach_norm(list(grads), 2.0, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
    return total


def clip_to_norm(grads: Sequence[Tensor], norm: float, bound: float) -> None:
    """Scale gradients of the given global norm in place so that it is at most `bound`."""
    scale = bound / (norm + EPSILON)
    if scale < 1.0:
        torch._foreach_mul_(list(grads), scale)
