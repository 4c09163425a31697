"""Kernels in place of `conv` and `scan` on CUDA: our own in Triton, and those of mamba-ssm and
causal-conv1d where they are installed.

b batch, l tokens, g groups, r heads of a group, p channels of a head, n numbers of a state."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SsmKernels:
    """Those of the packages, which autograd runs by functions of their own, so that torch.compile
    skips them."""

    def __init__(self) -> None:
        self.conv: Callable[..., Tensor] = torch.compiler.disable(_ssm_conv)
        self.scan: Callable[..., Tensor] = torch.compiler.disable(_ssm_scan)


def _ssm_conv(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """As `conv.causal_conv`."""
    causal_conv1d: Any = importlib.import_module("causal_conv1d")
    out: Tensor = causal_conv1d.causal_conv1d_fn(
        x.transpose(1, 2),
        weight.squeeze(1),
        bias,
        seq_idx=None if documents is None else documents.int().contiguous(),
        activation="silu",
    )
    return out.transpose(1, 2)


def _ssm_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    documents: Tensor | None,
) -> Tensor:
    """As `scan.chunked_scan` from a state of 0, without the state in the end."""
    combined: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    out: Tensor = combined.mamba_chunk_scan_combined(
        x.flatten(2, 3),
        dt.flatten(2, 3),
        a.flatten(),
        b,
        c,
        chunk_size,
        seq_idx=None if documents is None else documents.int().contiguous(),
    )
    return out.view_as(x)


# --- in Triton ---------------------------------------------------------------------------------

_CUDA: dict[str, Any] = {"mutates_args": (), "device_types": "cuda"}


@torch.library.custom_op("trainyard::causal_conv", **_CUDA)
def triton_conv(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """As `conv.causal_conv`."""
    from trainyard.kernels.causal_conv import conv_forward

    return conv_forward(x, weight, bias, documents)


@torch.library.custom_op("trainyard::causal_conv_backward", **_CUDA)
def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from trainyard.kernels.causal_conv import conv_backward

    return conv_backward(grad, x, weight, bias, documents)


@torch.library.custom_op("trainyard::ssd", **_CUDA)
def triton_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None
) -> Tensor:
    """As `scan.chunked_scan` from a state of 0, without the state in the end."""
    from trainyard.kernels.ssd import ssd_forward

    return ssd_forward(x, dt, a, b, c, documents)


@torch.library.custom_op("trainyard::ssd_backward", **_CUDA)
def _scan_backward(
    grad: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from trainyard.kernels.ssd_backward import ssd_backward

    return ssd_backward(grad, x, dt, a, b, c, documents)


@triton_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@triton_scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@_conv_backward.register_fake
@_scan_backward.register_fake
def _(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:-1])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


triton_conv.register_autograd(
    lambda ctx, grad: (*_conv_backward(grad, *ctx.saved_tensors), None), setup_context=_keep_inputs
)
triton_scan.register_autograd(
    lambda ctx, grad: (*_scan_backward(grad, *ctx.saved_tensors), None), setup_context=_keep_inputs
)
