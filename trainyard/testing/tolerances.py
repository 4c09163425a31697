"""Tolerances between results that should be equal, by what separates them.

A `Tolerance` is keyword arguments of torch.testing.assert_close, a `RunTolerance` is for a whole
run. Where nothing but a restart, a file, or a cut that adds up in the same order lies between two
results, the tolerance is none: compare with torch.equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class Tolerance(TypedDict):
    """Relative and absolute bound."""

    rtol: float
    atol: float


FP32_SUM_ORDER: Final[Tolerance] = {"rtol": 1e-5, "atol": 1e-6}
"""The same sums in fp32, added in another order: micro-batches, data-parallel ranks."""

FP32_UPDATE: Final[Tolerance] = {"rtol": 1e-4, "atol": 1e-6}
"""A few optimizer steps in fp32 against the formula in fp64."""

# --- whole runs -------------------------------------------------------------------------------


class RunTolerance(NamedTuple):
    """Bounds of what a run of a few steps comes to, all relative; tensors by `relative_error`."""

    loss: float
    grad_norm: float
    gradient: float
    """Every tensor of the first step's."""
    state: float
    """Every parameter and moment of the optimizer after the last step."""


FP32_LAYOUT: Final = RunTolerance(loss=1e-6, grad_norm=1e-5, gradient=1e-5, state=1e-5)
"""The same run in fp32, cut over ranks in another way: the same sums in another order."""

BF16_LAYOUT: Final = RunTolerance(loss=2e-3, grad_norm=4e-2, gradient=5e-2, state=2e-1)
"""The same in bf16, where ranks sum numbers of 8 bits: about twice the difference between bf16 and
fp32 in one process in these runs (at worst 1.3e-3, 2.3e-2, 1.8e-2 and 9.9e-2)."""

LEARNING: Final = 1e-3
"""Losses of tens of steps in fp32, cut in any way: relative."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| of two tensors, by the L2 norm.

    Number by number, those that are next to nothing would count most, and are rounding alone."""
    assert found.shape == expected.shape, (tuple(found.shape), tuple(expected.shape))
    difference = float((found.double() - expected.double()).norm())
    scale = float(expected.double().norm())
    return difference / scale if scale else difference
