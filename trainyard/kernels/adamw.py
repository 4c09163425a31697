"""AdamW over flat memory: gradients, main parameters and moments are read once, and the 16-bit
weights are written in the same pass. In place of `torch._fused_adamw_` and a copy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 1024, 4
"""Numbers that a block of threads updates."""
ALIGNMENT = 16
"""Tiles that begin and end at multiples of this are read with the widest loads."""


@triton.jit
def _update(
    grads_ptr,
    main_ptr,
    first_ptr,
    second_ptr,
    params_ptr,
    tiles_ptr,
    grad_scale,
    decay,
    beta1,
    beta2,
    eps,
    step_size,
    correction,
    aligned: tl.constexpr,
    publish: tl.constexpr,
    tile_size: tl.constexpr,
):
    tile = tl.program_id(0)
    start, stop = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if aligned:
        start, stop = tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
    places = start + tl.arange(0, tile_size)
    inside = places < stop
    grad = tl.load(grads_ptr + places, mask=inside).to(tl.float32) / grad_scale
    main = tl.load(main_ptr + places, mask=inside)
    first = tl.load(first_ptr + places, mask=inside).to(tl.float32)
    second = tl.load(second_ptr + places, mask=inside).to(tl.float32)
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    main = main * decay - step_size * first / (tl.sqrt(second) / correction + eps)
    tl.store(main_ptr + places, main, mask=inside)
    tl.store(first_ptr + places, first.to(first_ptr.dtype.element_ty), mask=inside)
    tl.store(second_ptr + places, second.to(second_ptr.dtype.element_ty), mask=inside)
    if publish:
        tl.store(params_ptr + places, main.to(params_ptr.dtype.element_ty), mask=inside)


def adamw(
    grads: Tensor,
    main: Tensor,
    moments: tuple[Tensor, Tensor],
    params: Tensor | None,
    tiles: Tensor,
    *,
    grad_scale: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    step_size: float,
    correction: float,
    aligned: bool,
) -> None:
    """One step in place, in `tiles` only: (n, 2) int64, each of at most `TILE` numbers.

    grads: divided by `grad_scale`. main: fp32. moments: fp32 or bf16, rounded when stored.
    params: written from main; None: not.
    decay: factor of main. step_size: of the first moment. correction: root of 1 - beta2^step.
    aligned: all ends of tiles are multiples of `ALIGNMENT`."""
    _update[(len(tiles),)](
        *(grads, main, *moments, main if params is None else params, tiles),
        *(grad_scale, decay, *betas, eps, step_size, correction),
        aligned=aligned,
        publish=params is not None,
        tile_size=TILE,
        num_warps=WARPS,
    )
