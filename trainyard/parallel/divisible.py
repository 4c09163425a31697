"""Checks that degrees of parallelism divide sizes; errors name both numbers and what would work.
Standard library only, so that they run before torch is loaded."""

from __future__ import annotations

import math

from trainyard.errors import ConfigError


def divides(what: str, value: int, by: str, divisor: int) -> None:
    """Raise ConfigError unless `divisor` divides `value`, naming the nearest that would."""
    if value % divisor:
        raise ConfigError(
            f"{what} ({value}) must be divisible by {by} ({divisor}); "
            f"{nearest(by, divisors(value, divisor))}"
        )


def nearest(flag: str, choices: list[int]) -> str:
    """`the nearest FLAG that works: 4 or 6`."""
    return f"the nearest {flag} that works: {' or '.join(map(str, choices))}"


def divisors(value: int, wanted: int) -> list[int]:
    """The divisors of `value` next to `wanted`: at most one below and one above."""
    small = [size for size in range(1, math.isqrt(value) + 1) if value % size == 0]
    found = sorted({*small, *(value // size for size in small)})
    below, above = [n for n in found if n <= wanted], [n for n in found if n > wanted]
    return below[-1:] + above[:1]


def multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, above 0."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]
