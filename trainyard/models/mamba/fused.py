"""Kernels on CUDA: our own in Triton, for all between the two projections, and in place of `conv`
and `scan` those of mamba-ssm and causal-conv1d where they are installed.

b batch, l tokens, g groups, r heads of a group, p channels of a head, n numbers of a state."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROW_CHANNELS = 8
"""causal-conv1d takes rows that are a multiple of so many numbers apart. In the projection they are
if this rank's number of heads is."""


class SsmKernels:
    """Those of the packages, which autograd runs by functions of their own, so that torch.compile
    skips them."""

    def __init__(self) -> None:
        self.conv: Callable[..., Tensor] = torch.compiler.disable(_ssm_conv)
        self.scan: Callable[..., Tensor] = torch.compiler.disable(_ssm_scan)


def _ssm_conv(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """As `conv.causal_conv`."""
    causal_conv1d: Any = importlib.import_module("causal_conv1d")
    if x.stride(1) % ROW_CHANNELS or x.stride(0) % ROW_CHANNELS:
        x = x.contiguous()
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


@torch.library.custom_op("trainyard::mamba_mixer", **_CUDA)
def triton_mixer(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    skip: Tensor,
    norm_weight: Tensor,
    documents: Tensor | None,
    groups: int,
    head_dim: int,
    dt_min: float,
    dt_max: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.mamba_mixer.mix_forward`; only the first of what it returns has a gradient."""
    from trainyard.kernels.mamba_mixer import Mixer, mix_forward

    parameters = (conv_weight, conv_bias, dt_bias, a_log, skip, norm_weight)
    return mix_forward(
        projected, Mixer(*parameters, documents, groups, head_dim, dt_min, dt_max, eps)
    )


@torch.library.custom_op("trainyard::mamba_mixer_backward", **_CUDA)
def _mixer_backward(
    grad: Tensor,
    convolved: Tensor,
    y: Tensor,
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    skip: Tensor,
    norm_weight: Tensor,
    documents: Tensor | None,
    groups: int,
    head_dim: int,
    dt_min: float,
    dt_max: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from trainyard.kernels.mamba_mixer import Mixer, mix_backward

    parameters = (conv_weight, conv_bias, dt_bias, a_log, skip, norm_weight)
    mixer = Mixer(*parameters, documents, groups, head_dim, dt_min, dt_max, eps)
    of_all = mix_backward(grad, projected, convolved, y, mixer)
    return of_all[0], of_all[1], of_all[2], of_all[3], of_all[4], of_all[5], of_all[6]


@triton_mixer.register_fake
def _(projected: Tensor, conv_weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    b, length, _ = projected.shape
    d = rest[4].shape[0]
    mixed = projected.new_empty((length, b, d)).transpose(0, 1)
    convolved = projected.new_empty((b, length, conv_weight.shape[0]))
    return mixed, convolved, projected.new_empty((b, length, d))


@_mixer_backward.register_fake
def _(
    grad: Tensor, convolved: Tensor, y: Tensor, projected: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    b, length, width = projected.shape
    of_projected = projected.new_empty((length, b, width)).transpose(0, 1)
    return of_projected, *(torch.empty_like(parameter) for parameter in rest[:6])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of these no zeros
    ctx.save_for_backward(*output[1:], *inputs[:8])
    ctx.settings = inputs[8:]


def _mixer_gradients(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Any, ...]:
    gradients = _mixer_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, *(None,) * (1 + len(ctx.settings)))


triton_mixer.register_autograd(_mixer_gradients, setup_context=_keep_inputs)
