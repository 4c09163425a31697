"""Tolerances between results that should be equal, by their difference.

A `Tolerance` is keyword arguments of torch.testing.assert_close, a `RunTolerance` is for a whole
run. Results that differ only by a restart, a file, or a sharding that adds in the same order have
no tolerance: compare them with torch.equal."""

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

BF16_LOG_PROBS: Final = 5e-2
"""`relative_error` of log-probabilities of a text by the same weights in bf16, passed at once or
token by token with a cache. Mostly below 1e-2; a router that chooses another expert, where two are
alike, adds to it."""

# --- whole runs -------------------------------------------------------------------------------


class RunTolerance(NamedTuple):
    """Relative bounds for the results of a run of a few steps; of tensors by `relative_error`."""

    loss: float
    grad_norm: float
    gradient: float
    """Of each gradient of the first step."""
    state: float
    """Of each parameter and moment of the optimizer after the last step."""


FP32_LAYOUT: Final = RunTolerance(loss=1e-6, grad_norm=1e-5, gradient=1e-5, state=1e-5)
"""The same run in fp32, sharded in another way: the same sums in another order."""

BF16_LAYOUT: Final = RunTolerance(loss=2e-3, grad_norm=4e-2, gradient=5e-2, state=2e-1)
"""The same in bf16, whose significand has 8 bits. About twice the difference between bf16 and fp32
in one process in these runs (at most 1.3e-3, 2.3e-2, 1.8e-2 and 9.9e-2)."""

LEARNING: Final = 1e-3
"""Relative difference of losses over tens of steps in fp32, sharded in any way."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| of two tensors, by the L2 norm.

    By elements, those near zero would have the largest errors, which are rounding alone."""
    assert found.shape == expected.shape, (tuple(found.shape), tuple(expected.shape))
    difference = float((found.double() - expected.double()).norm())
    scale = float(expected.double().norm())
    return difference / scale if scale else difference
