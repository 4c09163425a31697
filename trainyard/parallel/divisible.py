"""Sizes that degrees of parallelism must divide: every refusal names both numbers and what would
work. Standard library only, so that it is told before torch is loaded."""

from __future__ import annotations

import math

from trainyard.errors import ConfigError
from trainyard.parallel.config import CP, PP, TP, ParallelConfig


def check_world_size(config: ParallelConfig, world_size: int) -> None:
    """Refuse a number of ranks that the degrees do not divide."""
    unit = config.model_ranks
    if world_size % unit == 0:
        return
    degrees = {
        TP: config.tensor_model_parallel_size,
        PP: config.pipeline_model_parallel_size,
        CP: config.context_parallel_size,
    }
    product = " x ".join(f"{flag} ({size})" for flag, size in degrees.items())
    choices = " or ".join(str(count) for count in multiples(world_size, unit))
    raise ConfigError(
        f"{world_size} rank{'s' if world_size != 1 else ''} cannot be shared out: {product} = "
        f"{unit} must divide their number (what it leaves is data parallel); start {choices} "
        "ranks, or change a degree"
    )


def divides(what: str, value: int, by: str, divisor: int) -> None:
    """Refuse a value that `divisor` does not divide, with the nearest that would."""
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
