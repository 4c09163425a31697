"""Laws of rotary embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainyard.models.gpt.config import GPTConfig
from trainyard.models.rope import Rotary, apply_rotary, build_rotary, rotary_frequencies

CPU = torch.device("cpu")


def config(**changes: Any) -> GPTConfig:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
    return GPTConfig(**sizes | {"position_embedding_type": "rope"} | changes)


def at(positions: torch.Tensor, **changes: Any) -> Rotary:
    return build_rotary(config(**changes), positions, torch.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_depends_on_distance_only(interleaved: bool) -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> float:
        rotated = [
            apply_rotary(x, *at(torch.tensor([[p]]), rotary_interleaved=interleaved))
            for x, p in ((q, i), (k, j))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(5, 3) == pytest.approx(score(105, 103), abs=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-3)


def test_partial_rotation_leaves_the_rest_alone() -> None:
    x = torch.randn(3, 2, 4, 16)
    turned = apply_rotary(x, *at(torch.arange(3).unsqueeze(0), rotary_percent=0.5))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_interleaved_rotation_is_that_of_halves_with_channels_in_another_order() -> None:
    x, positions = torch.randn(3, 2, 4, 16), torch.arange(3).unsqueeze(0)
    order = torch.arange(16).view(2, 8).t().flatten()  # 0 8 1 9 ...
    halves = apply_rotary(x, *at(positions))
    pairs = apply_rotary(x[..., order], *at(positions, rotary_interleaved=True))
    torch.testing.assert_close(pairs, halves[..., order])


def test_a_scaling_leaves_short_wavelengths_and_divides_long_ones() -> None:
    plain = rotary_frequencies(config(kv_channels=128, rotary_base=5e5), CPU)
    scaled = rotary_frequencies(
        config(kv_channels=128, rotary_base=5e5, use_rope_scaling=True), CPU
    )
    assert torch.equal(plain[:28], scaled[:28])
    torch.testing.assert_close(plain[-20:] / 8, scaled[-20:])
    assert (scaled.diff() < 0).all()


def test_interpolation_is_a_slower_clock() -> None:
    slow = at(torch.tensor([[8]]), rotary_seq_len_interpolation_factor=4.0)
    torch.testing.assert_close(slow.cos, at(torch.tensor([[2]])).cos)
