"""Torch's LayerNorm and RMSNorm with a backward pass that reads its inputs once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

WIDTHS = range(512, 16384 + 1)
"""Channels that the kernel is for."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OwnBackward:
    """On a GPU a compiler writes the sums over rows in kernels of their own, and reads the inputs
    at half the bandwidth. The forward pass stays torch's, so that it fuses with its neighbours."""

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Where there is a backward pass, on a CUDA device."""
        known = x.dtype in DTYPES and weight.dtype in DTYPES
        return known and x.is_cuda and torch.is_grad_enabled()

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        """See `NormKernel`."""
        gain, shift = in_dtype_of(x, weight, bias, centred)
        out: Tensor = _Norm.apply(x, gain, shift, eps, weight.dtype)  # type: ignore[no-untyped-call]
        return out

    def forked(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> tuple[Tensor, Tensor]:
        """x, for the residual stream, and its norm: the kernel adds the gradients of both."""
        gain, shift = in_dtype_of(x, weight, bias, centred)
        out: tuple[Tensor, Tensor] = _ForkedNorm.apply(  # type: ignore[no-untyped-call]
            x, gain, shift, eps, weight.dtype
        )
        return out


def in_dtype_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, centred: bool
) -> tuple[Tensor, Tensor | None]:
    """Factor and summand of each channel in x's dtype; a centred weight is its distance from 1."""
    weight = weight.to(x.dtype)
    return weight + 1 if centred else weight, None if bias is None else bias.to(x.dtype)


def plain_norm(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm by torch, or RMSNorm if there is no bias."""
    if bias is None:
        return functional.rms_norm(x, gain.shape, gain, eps)
    return functional.layer_norm(x, gain.shape, gain, bias, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.eps, ctx.is_layer_norm = eps, bias is not None
        return _in_dtype(plain_norm(x, gain, bias, eps), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gradients(ctx, grad, None)


class _ForkedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gain)
        ctx.eps, ctx.is_layer_norm = eps, bias is not None
        return x.view_as(x), _in_dtype(plain_norm(x, gain, bias, eps), dtype)

    @staticmethod
    def backward(ctx: Any, stream: Tensor, grad: Tensor) -> Any:
        return _gradients(ctx, grad, stream)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Under torch.compile, torch 2.11 gives an autograd.Function no gradient if its forward pass
    ends with a `to` that changes nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _gradients(ctx: Any, grad: Tensor, stream: Tensor | None) -> tuple[Tensor | None, ...]:
    x, gain = ctx.saved_tensors
    of_x, of_gain, *of_bias = _backward_op(grad, stream, x, gain, ctx.eps, ctx.is_layer_norm)
    return of_x, of_gain, of_bias[0] if of_bias else None, None, None


@torch.library.custom_op("trainyard::norm_backward", mutates_args=(), device_types="cuda")
def _backward_op(
    grad: Tensor, stream: Tensor | None, x: Tensor, gain: Tensor, eps: float, is_layer_norm: bool
) -> list[Tensor]:
    from trainyard.kernels.norm_backward import norm_backward

    return norm_backward(grad, stream, x, gain, eps, is_layer_norm)


@_backward_op.register_fake
def _(
    grad: Tensor, stream: Tensor | None, x: Tensor, gain: Tensor, eps: float, is_layer_norm: bool
) -> list[Tensor]:
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [of_x, *(torch.empty_like(gain) for _ in range(1 + is_layer_norm))]
