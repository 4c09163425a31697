"""Casts to 8 bits, by their laws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainyard.fp8.cast import FORWARD, WIDE, cast_pair

BITS = {FORWARD: 3, WIDE: 2}
"""Of the mantissa."""


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def value(x: Tensor, dtype: torch.dtype) -> Tensor:
    pair = cast_pair(x, dtype)
    assert torch.equal(pair.columns.view(torch.uint8), pair.rows.view(torch.uint8).t())
    assert pair.columns.is_contiguous()
    return pair.rows.double() * pair.row_scale.double()


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_a_number_moves_by_half_a_unit_at_most_whatever_the_scale(
    dtype: torch.dtype, scale: float
) -> None:
    x = (draw(64, 48).double() * scale).to(torch.bfloat16)
    bound = x.double().abs() * 2.0 ** -(BITS[dtype] + 1)
    smallest = torch.finfo(dtype).smallest_normal * x.double().abs().amax()
    floor = smallest / torch.finfo(dtype).max * 2.0 ** -(BITS[dtype] + 1)
    assert ((value(x, dtype) - x.double()).abs() <= torch.maximum(bound, floor) * 1.0001).all()


@pytest.mark.parametrize("dtype", BITS)
def test_the_largest_magnitude_is_kept_and_what_is_stored_survives(dtype: torch.dtype) -> None:
    x = draw(32, 16)
    once = value(x, dtype)
    largest = x.abs().argmax()
    assert once.flatten()[largest].float() == pytest.approx(x.flatten()[largest].float())
    torch.testing.assert_close(value(once.float(), dtype), once, rtol=1e-6, atol=0)  # idempotent


def test_zeros_stay_zeros_and_one_row_has_a_transpose_of_its_own() -> None:
    pair = cast_pair(torch.zeros(1, 16), FORWARD)
    assert not pair.rows.float().any()
    assert pair.row_scale.isfinite()
    assert pair.rows.data_ptr() != pair.columns.data_ptr()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_finite(poison: float) -> None:
    x = draw(16, 16)
    x[3, 4] = poison
    assert not value(x, FORWARD).isfinite().all()
