"""Norms over a model on a CPU."""

from __future__ import annotations

import torch

from trainyard.optim.clip import sum_of_squares


def test_the_norm_of_a_large_tensor_is_exact() -> None:
    """torch's own, in fp32, is 4e-4 off."""
    many = torch.full((10_000, 1000), 0.5)
    assert sum_of_squares([many, many[:, ::2]], many.device).item() == 1.5e7 / 4
