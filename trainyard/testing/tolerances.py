"""How far two results may differ that should be the same, by what separates them.

Each is keyword arguments of torch.testing.assert_close. Where nothing but the number of processes,
a restart or a file lies between two results, the tolerance is none: compare with torch.equal."""

from __future__ import annotations

from typing import Final, TypedDict


class Tolerance(TypedDict):
    """Relative and absolute bound."""

    rtol: float
    atol: float


FP32_SUM_ORDER: Final[Tolerance] = {"rtol": 1e-5, "atol": 1e-6}
"""The same sums in fp32, added in another order: micro-batches, data-parallel ranks."""

FP32_UPDATE: Final[Tolerance] = {"rtol": 1e-4, "atol": 1e-6}
"""A few optimizer steps in fp32 against the formula in fp64."""

FP32_TRAINING: Final[Tolerance] = {"rtol": 1e-3, "atol": 1e-5}
"""Tens of training steps whose sums were added in another order."""
