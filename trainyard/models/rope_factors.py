"""Numbers of the scalings of rotary embedding. Standard library only."""

from __future__ import annotations

import math

from trainyard.models.config import TransformerConfig

LLAMA3_LOW_FREQUENCY, LLAMA3_HIGH_FREQUENCY = 1.0, 4.0
"""Wavelengths longer than the original length / low are stretched, shorter than / high are not."""


def yarn_gain(config: TransformerConfig) -> float:
    """Factor on queries and keys: attention grows with the logarithm of the stretch."""
    growth = 0.1 * math.log(max(config.yarn_rotary_scaling_factor, 1.0))
    return (config.yarn_mscale * growth + 1.0) / (config.yarn_mscale_all_dim * growth + 1.0)
