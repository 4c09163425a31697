"""Modules with losses of their own, and with sums over the micro-batches of a step.

Training treats all of them alike: it says what their losses weigh before a step, adds their sums up
over ranks after its backward passes, and hands them back once the parameters are updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.models.layer_sums import LayerSums
from trainyard.models.recompute import is_recomputing


class StepModule(nn.Module):
    """A part of a layer that adds something up over a step."""

    sums: Tensor
    """(width) fp64, this rank's part."""

    def __init__(self, layer: int, width: int) -> None:
        """layer: number in the whole model. width: numbers to add up."""
        super().__init__()
        self.layer = layer
        self.loss_weight, self.per_token = 1.0, False
        sums = torch.zeros(width, dtype=torch.float64)
        self.register_buffer("sums", sums, persistent=False)

    def begin_step(self, loss_weight: float, *, per_token: bool) -> None:
        """Forget the sums of the last step. loss_weight: factor of losses that are means over a
        micro-batch. per_token: multiply by its number of tokens as well."""
        self.loss_weight, self.per_token = loss_weight, per_token
        self.sums.zero_()

    @property
    def is_recording(self) -> bool:
        """Whether this forward pass is a training pass that counts."""
        return self.training and torch.is_grad_enabled() and not is_recomputing()

    def finish_step(self, sums: Sequence[float]) -> None:
        """Take the sums over all ranks; on every rank that has the module."""


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype = weight, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full((), ctx.weight, dtype=ctx.dtype, device=grad.device), None


def with_loss(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """x, whose backward pass adds the gradient of weight x loss, () of any pipeline stage."""
    out: Tensor = _WithLoss.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return out


def step_modules(chunks: Sequence[nn.Module]) -> list[StepModule]:
    """All of this rank."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, StepModule)]


def flat_sums(layout: LayerSums, modules: Sequence[StepModule], device: torch.device) -> Tensor:
    """(size) fp64: the sums of the modules on this rank, zeros for those of other stages."""
    values = torch.zeros(len(layout.layers), layout.width, dtype=torch.float64, device=device)
    for module in modules:
        values[layout.layers.index(module.layer)] = module.sums
    return values.flatten()
