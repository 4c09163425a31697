"""Counts of work at two sizes, which are the same on any machine, unlike times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

TIMES = 4
"""How much larger the second size is."""

LINEAR = 1.2 * TIMES
"""Most growth: a square would be 16 times."""


def calls(work: Callable[[], object]) -> int:
    """Calls of functions during some work, those of the interpreter included."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def grow(measure: Callable[[int], int], size: int) -> float:
    """How many times larger a count is for a size `TIMES` as large."""
    return measure(TIMES * size) / max(measure(size), 1)
