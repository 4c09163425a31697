"""When requests of an open loop are sent.

Pure functions of rate and seed. An open loop sends at these times whatever the server does, so a
slow server gets a queue, as from many independent users."""

from __future__ import annotations

import itertools
import random
from typing import Literal

Arrivals = Literal["poisson", "constant"]

MOST_ARRIVALS = 1_000_000
"""Of one measurement."""


def arrival_times(
    arrivals: Arrivals, rate: float, count: int, generator: random.Random
) -> list[float]:
    """Seconds from the start to each of `count` requests; the first is at 0.

    rate: requests a second. poisson: independent gaps of exponential distribution with mean
    1 / rate. constant: all gaps are 1 / rate."""
    if arrivals == "constant":
        return [index / rate for index in range(count)]
    gaps = (generator.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))[:count]


def arrivals_within(
    arrivals: Arrivals, rate: float, seconds: float, generator: random.Random
) -> list[float]:
    """The same for as many requests as come within a time; at most `MOST_ARRIVALS`."""
    # The Poisson count is below this bound but in one of 10^9 cases, where the last few are cut.
    bound = rate * seconds + 6 * (rate * seconds) ** 0.5 + 20
    times = arrival_times(arrivals, rate, min(int(bound), MOST_ARRIVALS), generator)
    return [time for time in times if time < seconds]
