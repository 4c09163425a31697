"""Rotary position embedding (arXiv:2104.09864) in the rotate-halves form of Megatron-LM and Llama.

s sequence, b batch, n heads, d head channels, r rotating channels (r <= d)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, rotary_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine at each position.

    positions: (b, s) or (1, s) integers. Returns two fp32 tensors (s, b, 1, r) to broadcast over
    heads; the second half of r repeats the first."""
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / base ** (exponents / rotary_dim)  # (r/2)
    angles = positions.t().float().unsqueeze(-1) * frequencies  # (s, b, r/2)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r channels of every head, pair (i, i + r/2) by its angle.

    x: (s, b, n, d); cos, sin: (s, b or 1, 1, r). Returns (s, b, n, d) in x's dtype."""
    rotary_dim = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rotating, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotating.chunk(2, dim=-1)
    rotated = rotating * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, passing), dim=-1) if passing.shape[-1] else rotated
