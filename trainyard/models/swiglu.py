"""silu(gate) x up with a backward pass that reads its inputs once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.kernels.available import TRITON

FEW_TOKENS = 256
"""In a step of generation, at most."""


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) x up of [gate; up] (arXiv:2002.05202). x: (..., 2 f). Returns (..., f)."""
    if not (TRITON and x.is_cuda):
        return _plain(x)
    if not torch.is_grad_enabled() and x.shape[:-1].numel() <= FEW_TOKENS:
        forward: Tensor = _forward_op(x)
        return forward
    y: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return y


def _plain(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """On a GPU a compiler computes both halves of the gradient from three inputs each, and reads
    them twice; the kernel writes both halves from one read. Outside a compiled layer, as in
    experts, a kernel does the forward pass too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if torch.compiler.is_compiling():
            return _plain(x)
        from trainyard.kernels.swiglu import swiglu_forward

        return swiglu_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x: Tensor = _backward_op(grad, x)
        return grad_x


@torch.library.custom_op("trainyard::swiglu_forward", mutates_args=(), device_types="cuda")
def _forward_op(x: Tensor) -> Tensor:
    """Opaque to a compiler, which would compute this again in each block of rows of the next
    product; for few tokens that then runs at half the bandwidth."""
    from trainyard.kernels.swiglu import swiglu_forward

    return swiglu_forward(x)


@_forward_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("trainyard::swiglu_backward", mutates_args=(), device_types="cuda")
def _backward_op(grad: Tensor, x: Tensor) -> Tensor:
    from trainyard.kernels.swiglu import swiglu_backward

    return swiglu_backward(grad, x)


@_backward_op.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
