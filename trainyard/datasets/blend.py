"""Which dataset each sample of a blend comes from.

Greedy, as Megatron-LM: sample i goes to the dataset that lags furthest behind its share of the i
samples so far; the first one wins a tie. Pure functions of weights and sizes, bit-equal to that
rule.

The rule looks at each dataset for each sample. But lags change little in a few steps, so `_walk`
chooses among near datasets: those whose lag reaches a floor by the end of a block of steps. The lag
of a dataset that is not chosen never falls, not even as a rounded float, so the others stay below
the floor for the whole block. If none of the near ones reaches it either, the block ends early, and
the next one has a lower floor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError

MAX_DATASETS = np.iinfo(np.int16).max

FEW_DATASETS = 40
"""So many are all near: to find the near ones would cost more (measured with 2 to 64 datasets)."""
BLOCK = 1.5
"""Steps of a block: a multiple of the root of the number of datasets (measured with 0.5 to 2)."""
FEW_CELLS = 100_000
"""Samples times datasets that Python walks sooner than numba has started."""

Indices: TypeAlias = tuple[NDArray[np.int16], NDArray[np.int64]]
Floats: TypeAlias = NDArray[np.float64]
Walk: TypeAlias = Callable[[Floats, Floats, Floats, NDArray[np.int16], NDArray[np.int64]], None]


def blend(weights: list[float], num_samples: int) -> Indices:
    """(dataset_index, dataset_sample_index), (n,) each, for datasets of unlimited size.

    weights: relative shares; the n samples keep within one of each share throughout."""
    shares = normalise(weights)
    return _assign(shares, np.full(len(shares), np.inf), num_samples)


def blend_exhaustive(sizes: list[int]) -> Indices:
    """The same, serving every sample of every dataset once, each dataset in proportion to its
    size."""
    limits = np.asarray(sizes, np.float64)
    return _assign(normalise(limits.tolist()), limits, sum(sizes))


def normalise(weights: list[float]) -> Floats:
    """Weights as shares of 1."""
    values = np.asarray(weights, np.float64)
    if len(values) > MAX_DATASETS:
        raise ConfigError(
            f"--data-path names {len(values)} datasets; a blend may have at most {MAX_DATASETS}"
        )
    if not len(values) or (values < 0).any() or not np.isfinite(values).all() or not values.sum():
        raise ConfigError(
            f"--data-path weights must be numbers of at least 0, not all 0, got {weights}"
        )
    shares: Floats = values / values.sum()
    return shares


def _assign(shares: Floats, limits: Floats, num_samples: int) -> Indices:
    """(n,) the dataset of each sample, and how many earlier samples came from it; a dataset that
    reached its limit is not chosen again."""
    chosen, ranks = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    walk = _walk if num_samples * len(shares) <= FEW_CELLS else compiled_walk()
    walk(shares, limits, np.where(limits > 0, 0.0, np.inf), chosen, ranks)
    return chosen, ranks


@cache
def compiled_walk() -> Walk:
    """`_walk` as machine code."""
    from trainyard.machine_code import machine_code  # takes half a second and 220 MB

    return machine_code("void(f8[::1], f8[::1], f8[::1], i2[::1], i8[::1])")(_walk)


def _walk(
    shares: Floats,
    limits: Floats,
    counts: Floats,
    chosen: NDArray[np.int16],
    ranks: NDArray[np.int64],
) -> None:
    """Fill `chosen` and `ranks` by the rule. counts: samples of each dataset so far; infinite: it
    is not chosen."""
    num_datasets, num_samples = len(shares), len(chosen)
    # The near datasets in order, and four more that are never chosen: the loop takes four at once.
    ids = np.zeros(num_datasets + 4, np.int64)
    share, count = np.zeros(num_datasets + 4), np.zeros(num_datasets + 4)
    length = num_samples
    if num_datasets > FEW_DATASETS:
        length = int(BLOCK * num_datasets**0.5)
    floor, slack, i = -np.inf, 1.0 / num_datasets, 0
    while i < num_samples:
        stop = min(i + length, num_samples)
        last = max(float(stop - 1), 1.0)
        near = 0
        for d in range(num_datasets):
            ids[near], share[near], count[near] = d, shares[d], counts[d]
            near += int(shares[d] * last - counts[d] >= floor)
        share[near : near + 4] = 0.0
        count[near : near + 4] = np.inf
        most = floor
        while i < stop:
            so_far = max(float(i), 1.0)
            most, best = -np.inf, 0
            for j in range(0, near, 4):
                # Without branches, which a processor could not foresee. The first of equals wins.
                lag0 = share[j] * so_far - count[j]
                lag1 = share[j + 1] * so_far - count[j + 1]
                lag2 = share[j + 2] * so_far - count[j + 2]
                lag3 = share[j + 3] * so_far - count[j + 3]
                first = j + 1 if lag1 > lag0 else j
                lag0 = lag1 if lag1 > lag0 else lag0
                second = j + 3 if lag3 > lag2 else j + 2
                lag2 = lag3 if lag3 > lag2 else lag2
                first = second if lag2 > lag0 else first
                lag0 = lag2 if lag2 > lag0 else lag0
                best = first if lag0 > most else best
                most = lag0 if lag0 > most else most
            if most < floor:
                break
            d = ids[best]
            chosen[i] = d
            ranks[i] = int(count[best])
            count[best] += 1.0
            if count[best] >= limits[d]:
                count[best] = np.inf
            i += 1
        for j in range(near):
            counts[ids[j]] = count[j]
        if num_datasets > FEW_DATASETS:
            # A block in about four ends early: so few datasets are near, and most blocks last.
            slack = min(max(slack * (0.9 if i == stop else 1.3), 0.01 / num_datasets), 1.0)
            floor = most - slack
