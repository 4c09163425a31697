"""Models with weights like those of a training."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def perturb(model: Model, *, seed: int, scale: float) -> Model:
    """Add noise to every weight, so that no bias is 0 and no scale of a norm is 1: a tensor that is
    left out or taken for another shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model
