"""Norms over the whole model under any layout, and gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before dividing by it, as Megatron-LM does."""


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all tensors together, fp32, on their device: for one rank that has all.

    Tensor by tensor, then over tensors."""
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
    return total


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """What this rank adds to the square of a norm over ranks; () fp64.

    In fp64, rounding the norm to fp32 hides the order of the sums: the same gradient has the same
    norm under every layout and is clipped alike."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=torch.float64)
    return torch.stack(list(norms)).square().sum()


def count_zeros(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """How many numbers are zero; () fp64, exact."""
    counts = [tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]
    if not counts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(counts).sum().double()


def clip_factor(norm: float, bound: float) -> float:
    """What gradients of this norm are to be multiplied by so that it is at most `bound`; a bound of
    0 is none."""
    return min(1.0, bound / (norm + EPSILON)) if bound > 0 else 1.0
