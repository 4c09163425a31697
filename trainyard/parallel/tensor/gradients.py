"""Sums gradients of whole parameters over tensor-parallel ranks, which saw parts of the
sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import has_partial_grad
from trainyard.parallel.tensor.collectives import all_reduce

GradOf = Callable[[nn.Parameter], Tensor | None]


def own_grad(parameter: nn.Parameter) -> Tensor | None:
    """Where autograd leaves a gradient."""
    return parameter.grad


def reduce_partial_gradients(
    parameters: Iterable[nn.Parameter], parallel: ModelParallel, grad_of: GradOf = own_grad
) -> None:
    """Add the gradients of norms and of row-parallel biases up over the tensor-parallel ranks.

    Under sequence parallelism a rank computes them from its tokens only (Megatron-LM's
    `finalize_model_grads`). All that have one type travel in one buffer, in the order given, once a
    step, before or after the sum over data-parallel ranks. grad_of: where the gradient lies; None
    for a parameter without one, which must be so on every rank."""
    if parallel.tp is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        grad = grad_of(parameter) if has_partial_grad(parameter) else None
        if grad is not None:
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        total = all_reduce(torch.cat([grad.flatten() for grad in grads]), parallel.tp)
        sums = total.split([grad.numel() for grad in grads])
        torch._foreach_copy_(
            grads, [part.view_as(grad) for part, grad in zip(sums, grads, strict=True)]
        )
