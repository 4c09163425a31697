"""Rotary position embedding (arXiv:2104.09864), with scalings for sequences longer than in
training: linear, Llama 3.1's, YaRN (arXiv:2309.00071).

Computed once per forward pass for all layers. s sequence, b batch, n heads, d head channels, r
rotating channels (r <= d)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.models.config import TransformerConfig
from trainyard.models.rope_factors import (
    LLAMA3_HIGH_FREQUENCY,
    LLAMA3_LOW_FREQUENCY,
    yarn_gain,
)


class Rotary(NamedTuple):
    """Arguments of `apply_rotary(x, *rotary)`."""

    cos: Tensor
    """(s, b or 1, 1, r)"""
    sin: Tensor
    """(s, b or 1, 1, r)"""
    interleaved: bool = False
    """Neighbouring channels rotate together, not channel i with i + r/2."""


def build_rotary(config: TransformerConfig, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """The rotation at each of `positions`, (b, s) or (1, s) integers, in the dtype of the heads."""
    frequencies = rotary_frequencies(config, positions.device)
    turned = positions.t().float()
    if config.rotary_seq_len_interpolation_factor is not None:
        turned = turned * (1.0 / config.rotary_seq_len_interpolation_factor)
    angles = turned.unsqueeze(-1) * frequencies  # (s, b, r/2)
    if config.rotates_neighbours:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.unsqueeze(2).cos(), angles.unsqueeze(2).sin()
    if config.stretched_by_yarn:
        gain = yarn_gain(config)
        cos, sin = cos * gain, sin * gain
    return Rotary(cos.to(dtype), sin.to(dtype), config.rotates_neighbours)


def rotary_frequencies(config: TransformerConfig, device: torch.device) -> Tensor:
    """Radians by which each pair of channels turns from one position to the next, (r/2) fp32."""
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / config.rotary_base ** (exponents / dim)
    if config.use_rope_scaling:
        length = config.rope_scaling_original_max_position_embeddings
        return _llama3_scaled(frequencies, config.rope_scaling_factor, length)
    if config.stretched_by_yarn:
        return _yarn_scaled(frequencies, config)
    return frequencies


def _llama3_scaled(frequencies: Tensor, factor: float, original_length: int) -> Tensor:
    """Stretch long wavelengths by the factor, short ones not, those between by a share of it."""
    turns = original_length * frequencies / (2 * math.pi)  # over the original length
    low, high = LLAMA3_LOW_FREQUENCY, LLAMA3_HIGH_FREQUENCY
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn_scaled(frequencies: Tensor, config: TransformerConfig) -> Tensor:
    """The share of stretching rises linearly from one bounding channel to the other."""
    low = _yarn_channel(config, config.yarn_beta_fast)
    high = _yarn_channel(config, config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, config.rotary_dim - 1.0)
    channels = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    span = high - low if high != low else 0.001
    stretched = ((channels - low) / span).clamp(0.0, 1.0)
    factor = config.yarn_rotary_scaling_factor
    return frequencies / factor * stretched + frequencies * (1 - stretched)


def _yarn_channel(config: TransformerConfig, turns: float) -> float:
    """The pair of channels that turns so often over the original length."""
    length = config.yarn_original_max_position_embeddings
    numerator = config.rotary_dim * math.log(length / (turns * 2 * math.pi))
    return numerator / (2 * math.log(config.rotary_base))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first r channels of every head, pair by pair, by the angle of the pair.

    x: (s, b, n, d); cos, sin: (s, b or 1, 1, r). Returns (s, b, n, d) in x's dtype."""
    rotary_dim = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rotating, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    rotated = rotating * cos + _quarter_turn(rotating, interleaved) * sin
    return torch.cat((rotated, passing), dim=-1) if passing.shape[-1] else rotated


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """(a, b) of each pair becomes (-b, a)."""
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((-second, first), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
