"""The causal convolution before the state space: a few earlier tokens of each channel, then
SiLU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    documents: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """silu(sum of weight_j x_{t - w + 1 + j} + bias) of each channel, computed in fp32; like x.

    x: (b, l, c). weight: (c, 1, w). bias: (c). documents: (b, l) ascending numbers; tokens of
    others count as 0. before: (b, w - 1, c) the inputs before x; unset: 0."""
    taps, length = weight.squeeze(1).float(), x.shape[1]
    reach = taps.shape[1] - 1
    padded = _after(before, x, reach)
    out = bias.float() + taps[:, reach] * x.float()
    for back in range(1, reach + 1):
        earlier = padded[:, reach - back : reach - back + length].float()
        if documents is not None:
            first = functional.pad(documents, (back, 0), value=-1)[:, :length]
            earlier = earlier * (first == documents).unsqueeze(-1)
        out = out + taps[:, reach - back] * earlier
    return functional.silu(out).to(x.dtype)


def last_inputs(x: Tensor, before: Tensor, counts: Tensor | None = None) -> Tensor:
    """(b, w - 1, c): what a convolution over further tokens needs of x, (b, l, c), and of `before`,
    the same of the tokens before. counts: (b) tokens of each row, the rest is padding; unset: l."""
    reach = before.shape[1]
    padded = _after(before, x, reach)
    if counts is None:
        return padded[:, x.shape[1] :]
    places = counts.unsqueeze(1) + torch.arange(reach, device=x.device)
    return padded.take_along_dim(places.unsqueeze(-1), dim=1)


def _after(before: Tensor | None, x: Tensor, reach: int) -> Tensor:
    """(b, reach + l, c)."""
    if before is None:
        return functional.pad(x, (0, 0, reach, 0))
    return torch.cat((before, x), dim=1)
