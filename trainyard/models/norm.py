"""Normalisation over the hidden dimension: a table of the two kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.models.config import GPTConfig


class LayerNorm(nn.Module):
    """Mean and variance over the last dimension, then scale and shift (arXiv:1607.06450)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., h). Returns the same shape and dtype; statistics are in fp32."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square over the last dimension, then scale (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., h). Returns the same shape and dtype; statistics are in fp32."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def build_norm(config: GPTConfig) -> LayerNorm | RMSNorm:
    """The normalisation that `--normalization` names."""
    return NORMS[config.normalization](config.hidden_size, config.norm_epsilon)
