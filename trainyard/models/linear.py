"""The linear map of the model, with its parameters left unfilled.

`init.py` or a checkpoint fills them; nothing draws random numbers while a model is built."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """y = x W^T + b; weight (out, in), bias (out) or None."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in). Returns (..., out)."""
        return functional.linear(x, self.weight, self.bias)
