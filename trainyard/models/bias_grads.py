"""What stands behind a product with a bias, with a backward pass that reads each gradient once and
gives that of the bias as well. A compiler reads the gradient again to add it up over the tokens.

The product must not connect its bias to autograd: see `ColumnParallelLinear.forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainyard.kernels.available import TRITON

KINDS = ("gelu", "gelu_tanh", "quick_gelu", "squared_relu")
"""Activations that have a kernel."""
PARTS, TOKENS_OF_PART = 128, 16
"""Most parts of the tokens that are added up one by one, and the fewest tokens of a part."""


def gives_bias_grads(x: Tensor) -> bool:
    """Whether the functions below are for x, the input of the product."""
    return TRITON and x.is_cuda and torch.is_grad_enabled()


def num_parts(tokens: int) -> int:
    """Parts of which a kernel gives the sums."""
    return min(PARTS, -(-tokens // TOKENS_OF_PART))


def activated(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """The activation of x (..., f), which contains bias (f)."""
    y: Tensor = _Activated.apply(x, bias, kind)  # type: ignore[no-untyped-call]
    return y


class _Activated(torch.autograd.Function):
    """Keeps its output for the next product, where a compiler would compute it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        y: Tensor = _forward_op(x, kind)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        grad_x, sums = _backward_op(grad, x, ctx.kind)
        return grad_x, sums.sum(0).to(grad.dtype), None


@torch.library.custom_op("trainyard::activation_forward", mutates_args=(), device_types="cuda")
def _forward_op(x: Tensor, kind: str) -> Tensor:
    from trainyard.kernels.activations import activation_forward

    return activation_forward(x, kind)


@_forward_op.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("trainyard::activation_backward", mutates_args=(), device_types="cuda")
def _backward_op(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    from trainyard.kernels.activations import activation_backward

    return activation_backward(grad, x, kind, num_parts(x.shape[:-1].numel()))


@_backward_op.register_fake
def _(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    sums = x.new_empty((num_parts(x.shape[:-1].numel()), x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


def split_heads(qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(s, b, g, r, d) queries, (s, b, g, 1, d) keys and values of qkv, (s, b, g, r + 2, d), which
    contains bias (g (r + 2) d)."""
    q, k, v = _SplitHeads.apply(qkv, bias)  # type: ignore[no-untyped-call]
    return q, k, v


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return torch.split(qkv, [qkv.shape[3] - 2, 1, 1], dim=3)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        grad, sums = _join_op(q, k, v)
        return grad, sums.sum(0).to(grad.dtype)


@torch.library.custom_op("trainyard::join_heads", mutates_args=(), device_types="cuda")
def _join_op(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from trainyard.kernels.join_heads import join_heads

    return join_heads(q, k, v, num_parts(q.shape[0] * q.shape[1]))


@_join_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s, b, g, r, d = q.shape
    sums = q.new_empty((num_parts(s * b), g * (r + 2) * d), dtype=torch.float32)
    return q.new_empty(s, b, g, r + 2, d), sums
