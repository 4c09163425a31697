"""Casts to 8 bits with a scale for each tile or block, by their laws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainyard.fp8.blockwise import TILE, cast_blocks, cast_tiles, decode
from trainyard.fp8.cast import FORWARD, SMALLEST, Fp8Pair
from trainyard.fp8.product import scaled_product

LIMIT = 448.0
"""Of e4m3."""
Cast = Callable[[Tensor, torch.dtype], Fp8Pair]


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Numbers whose size differs a lot from place to place."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-12, 12, shape, generator=generator).float().exp2()
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def maxima(x: Tensor, height: int) -> Tensor:
    """Of each part of so many rows and 128 columns, as large as `x`."""
    m, k = x.shape
    parts = x.view(m // height, height, k // TILE, TILE)
    return parts.abs().amax((1, 3), keepdim=True).expand_as(parts).reshape(m, k).double()


@pytest.mark.parametrize(("cast", "height"), [(cast_tiles, 1), (cast_blocks, TILE)])
def test_a_number_moves_by_half_a_unit_at_the_scale_of_its_part(cast: Cast, height: int) -> None:
    x = draw(256, 384)
    x[:TILE, :TILE] = 0
    pair = cast(x, FORWARD)
    layouts = (
        (x, pair.rows, pair.row_scale),
        (x.t().contiguous(), pair.columns, pair.column_scale),
    )
    for exact, values, scale in layouts:
        assert values.is_contiguous()
        least = maxima(exact, height) / LIMIT * 2.0**-9  # of a scale up to twice as coarse
        bound = torch.maximum(exact.double().abs() * 2.0**-4, least)
        moved = (decode(values, scale).double() - exact.double()).abs()
        assert (moved <= bound).all()
        used = scale[scale > 0]  # zeros fill up
        assert torch.equal(used, used.log2().round().exp2())
    largest = maxima(x, height) / decode(torch.ones(x.shape).to(FORWARD), pair.row_scale).double()
    assert (largest[largest > 0] > LIMIT / 2).all()
    assert (largest <= LIMIT).all()


@pytest.mark.parametrize("cast", [cast_tiles, cast_blocks])
def test_a_row_of_as_many_scales_as_a_block_has_rows_is_decoded(cast: Cast) -> None:
    x = torch.ones(TILE * TILE, TILE, dtype=torch.bfloat16)
    x[TILE:] = 2.0**-20  # in one scale with the ones it would be another number
    pair = cast(x, FORWARD)
    assert torch.equal(decode(pair.rows, pair.row_scale), x.float())
    assert torch.equal(decode(pair.columns, pair.column_scale), x.t().float())


@pytest.mark.parametrize("cast", [cast_tiles, cast_blocks])
def test_what_is_stored_survives_another_cast(cast: Cast) -> None:
    pair = cast(draw(128, 256), FORWARD)
    once = decode(pair.rows, pair.row_scale)
    again = cast(once, FORWARD)
    assert torch.equal(decode(again.rows, again.row_scale), once)


def test_a_large_number_costs_none_but_its_tile_and_its_block() -> None:
    x = draw(256, 256)
    spiked = x.clone()
    spiked[3, 5] = 1e8
    for cast, others in ((cast_tiles, 1), (cast_blocks, TILE)):
        first, second = (cast(value, FORWARD) for value in (x, spiked))
        plain, hurt = (decode(pair.rows, pair.row_scale) for pair in (first, second))
        differs = torch.zeros(256, 256, dtype=torch.bool)
        differs[3 // others * others : 3 // others * others + others, :TILE] = True
        assert torch.equal(plain[~differs], hurt[~differs])
        assert not torch.equal(plain[differs], hurt[differs])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_finite_after_a_product(poison: float) -> None:
    x, weight = draw(128, 128), cast_blocks(draw(128, 128, seed=2), FORWARD)
    x[3, 5] = poison
    pair = cast_tiles(x, FORWARD)
    out = scaled_product(pair.rows, weight.rows, pair.row_scale, weight.row_scale, torch.bfloat16)
    assert not out[3].isfinite().any()
    assert out[:3].isfinite().all()


def test_scales_lie_as_products_of_a_gpu_read_them() -> None:
    x = torch.ones(256, 640) * SMALLEST
    tiles, blocks = cast_tiles(x, FORWARD), cast_blocks(x, FORWARD)
    assert tiles.row_scale.shape == (5, 256)
    assert tiles.column_scale.shape == (2, 640)
    assert blocks.row_scale.shape == (2, 8)  # filled up to a multiple of 4
    assert blocks.column_scale.shape == (5, 4)
    assert not blocks.row_scale[:, 5:].any()
