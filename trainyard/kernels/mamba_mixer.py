"""All of a Mamba-2 layer between its two projections, and the backward pass: convolution, state
space, gated norm. The gradient of what the first projection gives is one tensor of which each
kernel writes its columns.

b batch, l tokens, g groups, r heads of a group, p channels of a head, n numbers of a state; d = g r
p. `projected` has the gate (d), then x (d), B and C (g n each), then the time steps (g r)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.kernels.causal_conv import conv_backward, conv_forward
from trainyard.kernels.gated_norm import norm_backward, norm_forward
from trainyard.kernels.ssd import Sequence, ssd_forward
from trainyard.kernels.ssd_backward import ssd_backward


@dataclass(frozen=True, slots=True)
class Mixer:
    """Parameters and sizes of a layer, and the documents of the tokens."""

    conv_weight: Tensor
    """(d + 2 g n, 1, w)"""
    conv_bias: Tensor
    dt_bias: Tensor
    """(g r), as a_log and skip."""
    a_log: Tensor
    skip: Tensor
    norm_weight: Tensor
    """(d)"""
    documents: Tensor | None
    """(b, l) ascending numbers; no token sees another document."""
    groups: int
    head_dim: int
    dt_min: float
    dt_max: float | None
    eps: float

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Views: gate, what the convolution reads, time steps."""
        d, heads = self.norm_weight.shape[0], self.dt_bias.shape[0]
        return torch.split(projected, [d, projected.shape[2] - d - heads, heads], dim=2)

    def heads(self, convolved: Tensor) -> tuple[Tensor, ...]:
        """Views: x (b, l, g, r, p), B and C (b, l, g, n)."""
        d = self.norm_weight.shape[0]
        shared = (convolved.shape[2] - d) // 2
        x, b, c = convolved.split((d, shared, shared), dim=2)
        by_head = x.unflatten(2, (self.groups, -1, self.head_dim))
        return by_head, b.unflatten(2, (self.groups, -1)), c.unflatten(2, (self.groups, -1))

    def sequence(self, convolved: Tensor, raw: Tensor) -> Sequence:
        """What the scan reads. raw: (b, l, g r) fp32 time steps before softplus."""
        x, b, c = self.heads(convolved)
        steps = functional.softplus(raw).clamp(self.dt_min, self.dt_max)
        by_group = (self.groups, -1)
        rate, skip = -torch.exp(self.a_log.float()), self.skip.float()
        return Sequence(
            *(x, steps.unflatten(2, by_group), rate.view(by_group), skip.view(by_group)),
            *(b, c, self.documents),
        )


def mix_forward(projected: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    """What the last projection reads (b, l, d), and for the backward pass what the convolution
    and the scan gave. projected: (b, l, 2 d + 2 g n + g r)."""
    gate, inputs, dt = mixer.split(projected)
    convolved = conv_forward(inputs, mixer.conv_weight, mixer.conv_bias, mixer.documents)
    y = ssd_forward(mixer.sequence(convolved, dt.float() + mixer.dt_bias.float())).flatten(2)
    mixed = empty_by_token(y, y.shape[2])
    norm_forward(y, gate, mixer.norm_weight, mixer.groups, mixer.eps, mixed)
    return mixed, convolved, y


def mix_backward(
    grad: Tensor, projected: Tensor, convolved: Tensor, y: Tensor, mixer: Mixer
) -> tuple[Tensor, ...]:
    """Gradients of projected, conv_weight, conv_bias, dt_bias, a_log, skip, norm_weight. grad:
    (b, l, d). The rest as `mix_forward` took and gave it."""
    gate, inputs, dt = mixer.split(projected)
    projected_grad = empty_by_token(projected, projected.shape[2])
    gate_grad, inputs_grad, dt_grad = mixer.split(projected_grad)
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    y_grad, norm_grad = norm_backward(
        grad, y, gate, mixer.norm_weight, mixer.groups, mixer.eps, gate_grad
    )
    raw = dt.float() + mixer.dt_bias.float()
    sequence = mixer.sequence(convolved, raw)
    convolved_grad = torch.empty_like(convolved)
    steps_grad, rate_grad, skip_grad = ssd_backward(
        y_grad.view(sequence.x.shape), sequence, *mixer.heads(convolved_grad)
    )
    steps = functional.softplus(raw)
    inside = steps >= mixer.dt_min
    if mixer.dt_max is not None:
        inside &= steps <= mixer.dt_max
    raw_grad = steps_grad.flatten(2) * torch.sigmoid(raw) * inside
    dt_grad.copy_(raw_grad)
    conv_grads = conv_backward(
        *(convolved_grad, inputs, mixer.conv_weight, mixer.conv_bias, mixer.documents),
        inputs_grad,
    )
    a_log_grad = (rate_grad * sequence.rate).flatten()
    of_heads = (raw_grad.sum((0, 1)), a_log_grad, skip_grad.flatten())
    parameters = (mixer.dt_bias, mixer.a_log, mixer.skip)
    narrow = (found.to(like.dtype) for found, like in zip(of_heads, parameters, strict=True))
    return projected_grad, *conv_grads, *narrow, norm_grad


def empty_by_token(like: Tensor, channels: int) -> Tensor:
    """(b, l, channels) in memory as (l, b, channels), which the projections read and write."""
    b, length = like.shape[:2]
    return like.new_empty((length, b, channels)).transpose(0, 1)
