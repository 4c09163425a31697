"""Which dataset each sample of a blend comes from.

Greedy, as Megatron-LM: sample i goes to the dataset that lags furthest behind its share of the i
samples so far; the first one wins a tie. Pure functions of weights and sizes, bit-equal to that
rule.

The rule looks at each dataset for each sample. But lags change little in a few steps, so `_walk`
chooses among near datasets: those whose lag reaches a floor by the end of a block of steps. The lag
of a dataset that is not chosen never falls, not even as a rounded float, so the others stay below
the floor for the whole block. If none of the near ones reaches it either, the block ends early, and
the next one has a lower floor. Up to six datasets fit into registers: `_walk_six` looks at all of
them, without a branch.

A blend can be made in pieces, so that who writes it to a file needs no memory for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError

if TYPE_CHECKING:
    from trainyard.machine_code import Compiled

MAX_DATASETS = np.iinfo(np.int16).max

SIX = 6
"""So many datasets or fewer are walked in registers."""
FEW_DATASETS = 40
"""So many are all near: to find the near ones would cost more (measured with 2 to 64 datasets)."""
BLOCK = 1.5
"""Steps of a block: a multiple of the root of the number of datasets (measured with 0.5 to 2)."""
FEW_CELLS = 100_000
"""Samples times datasets that Python walks sooner than the compiled loop is loaded."""

PIECE = 1 << 17
"""Samples of a piece: 1.3 MB."""

Indices: TypeAlias = tuple[NDArray[np.int16], NDArray[np.int64]]
Floats: TypeAlias = NDArray[np.float64]


def blend(weights: list[float], num_samples: int) -> Indices:
    """(dataset_index, dataset_sample_index), (n,) each, for datasets of unlimited size.

    weights: relative shares; the n samples keep within one of each share throughout."""
    return _whole(*_unlimited(weights), num_samples)


def blend_exhaustive(sizes: list[int]) -> Indices:
    """The same, serving every sample of every dataset once, each dataset in proportion to its
    size."""
    return _whole(*_in_proportion(sizes), sum(sizes))


def blend_pieces(weights: list[float], num_samples: int) -> Iterator[Indices]:
    """`blend` in pieces of at most PIECE samples."""
    return _pieces(*_unlimited(weights), num_samples)


def exhaustive_pieces(sizes: list[int]) -> Iterator[Indices]:
    """`blend_exhaustive` in pieces of at most PIECE samples."""
    return _pieces(*_in_proportion(sizes), sum(sizes))


def _unlimited(weights: list[float]) -> tuple[Floats, Floats]:
    """Shares and limits."""
    shares = normalise(weights)
    return shares, np.full(len(shares), np.inf)


def _in_proportion(sizes: list[int]) -> tuple[Floats, Floats]:
    """Shares and limits."""
    limits = np.asarray(sizes, np.float64)
    return normalise(limits.tolist()), limits


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


def _whole(shares: Floats, limits: Floats, num_samples: int) -> Indices:
    chosen, ranks = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    _walker(shares, limits, num_samples)(0, chosen, ranks)
    return chosen, ranks


def _pieces(shares: Floats, limits: Floats, num_samples: int) -> Iterator[Indices]:
    walk = _walker(shares, limits, num_samples)
    for first in range(0, num_samples, PIECE):
        length = min(PIECE, num_samples - first)
        chosen, ranks = np.empty(length, np.int16), np.empty(length, np.int64)
        walk(first, chosen, ranks)
        yield chosen, ranks


def _walker(
    shares: Floats, limits: Floats, num_samples: int
) -> Callable[[int, NDArray[np.int16], NDArray[np.int64]], None]:
    """Fills (n,) the dataset of each sample from a first one on, and how many earlier samples came
    from it; a dataset that reached its limit is not chosen again. To be called in order."""
    counts = np.where(limits > 0, 0.0, np.inf)
    # Of the near datasets, and four more that are never chosen: the loop takes four at once.
    room = len(shares) + 4
    near = np.zeros(room, np.int64), np.zeros(room), np.zeros(room)
    if num_samples * len(shares) <= FEW_CELLS:
        return partial(_walk, shares, limits, counts, *near)
    if len(shares) > SIX:
        return partial(_compiled_walk(), shares, limits, counts, *near)
    absent = (0, SIX - len(shares))
    limits, counts = (np.pad(one, absent, constant_values=np.inf) for one in (limits, counts))
    return partial(_compiled_walk_six(), np.pad(shares, absent), limits, counts)


def start(num_datasets: int) -> None:
    """Compile what blends of so many datasets need, or find it compiled."""
    (_compiled_walk_six() if num_datasets <= SIX else _compiled_walk()).load()


@cache
def _compiled_walk() -> Compiled:
    """`_walk` as machine code."""
    from trainyard.machine_code import Compiled  # LLVM takes time and memory

    near = "i8[::1], f8[::1], f8[::1]"
    return Compiled(_walk, f"void(f8[::1], f8[::1], f8[::1], {near}, i8, i2[::1], i8[::1])")


@cache
def _compiled_walk_six() -> Compiled:
    from trainyard.machine_code import Compiled

    return Compiled(_walk_six, "void(f8[::1], f8[::1], f8[::1], i8, i2[::1], i8[::1])")


def _walk(
    shares: Floats,
    limits: Floats,
    counts: Floats,
    ids: NDArray[np.int64],
    share: Floats,
    count: Floats,
    first: int,
    chosen: NDArray[np.int16],
    ranks: NDArray[np.int64],
) -> None:
    """Fill `chosen` and `ranks` by the rule, from sample `first` on. counts: samples of each
    dataset so far; infinite: it is not chosen. ids, share, count: to write to, of the near datasets
    in order."""
    num_datasets, num_samples = len(shares), len(chosen)
    length = num_samples
    if num_datasets > FEW_DATASETS:
        length = int(BLOCK * num_datasets**0.5)
    floor, slack, i = -np.inf, 1.0 / num_datasets, 0
    while i < num_samples:
        stop = min(i + length, num_samples)
        last = max(float(first + stop - 1), 1.0)
        near = 0
        for d in range(num_datasets):
            ids[near], share[near], count[near] = d, shares[d], counts[d]
            near += int(shares[d] * last - counts[d] >= floor)
        share[near : near + 4] = 0.0
        count[near : near + 4] = np.inf
        most = floor
        while i < stop:
            so_far = max(float(first + i), 1.0)
            most, best = -np.inf, 0
            for j in range(0, near, 4):
                # Without branches, which a processor could not foresee. The first of equals wins.
                lag0 = share[j] * so_far - count[j]
                lag1 = share[j + 1] * so_far - count[j + 1]
                lag2 = share[j + 2] * so_far - count[j + 2]
                lag3 = share[j + 3] * so_far - count[j + 3]
                lead = j + 1 if lag1 > lag0 else j
                lag0 = lag1 if lag1 > lag0 else lag0
                second = j + 3 if lag3 > lag2 else j + 2
                lag2 = lag3 if lag3 > lag2 else lag2
                lead = second if lag2 > lag0 else lead
                lag0 = lag2 if lag2 > lag0 else lag0
                best = lead if lag0 > most else best
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


def _walk_six(
    shares: Floats,
    limits: Floats,
    counts: Floats,
    first: int,
    chosen: NDArray[np.int16],
    ranks: NDArray[np.int64],
) -> None:
    """`_walk` for six datasets, of which any are absent: of share 0 and infinite counts.

    Six variables are six registers; a loop over an array would wait for memory in each step."""
    s0, s1, s2, s3, s4, s5 = shares[0], shares[1], shares[2], shares[3], shares[4], shares[5]
    m0, m1, m2, m3, m4, m5 = limits[0], limits[1], limits[2], limits[3], limits[4], limits[5]
    c0, c1, c2, c3, c4, c5 = counts[0], counts[1], counts[2], counts[3], counts[4], counts[5]
    for i in range(len(chosen)):
        so_far = max(float(first + i), 1.0)
        lag0, lag1, lag2 = s0 * so_far - c0, s1 * so_far - c1, s2 * so_far - c2
        lag3, lag4, lag5 = s3 * so_far - c3, s4 * so_far - c4, s5 * so_far - c5
        most = max(max(max(lag0, lag1), max(lag2, lag3)), max(lag4, lag5))
        # The first of equals wins.
        is0 = lag0 == most
        later = not is0
        is1 = later and lag1 == most
        later = later and not is1
        is2 = later and lag2 == most
        later = later and not is2
        is3 = later and lag3 == most
        later = later and not is3
        is4 = later and lag4 == most
        is5 = later and not is4
        chosen[i] = int(is1) + 2 * int(is2) + 3 * int(is3) + 4 * int(is4) + 5 * int(is5)
        count = c1 if is1 else c0
        count = c2 if is2 else count
        count = c3 if is3 else count
        count = c4 if is4 else count
        count = c5 if is5 else count
        ranks[i] = int(count)
        count += 1.0
        c0 = (count if count < m0 else np.inf) if is0 else c0
        c1 = (count if count < m1 else np.inf) if is1 else c1
        c2 = (count if count < m2 else np.inf) if is2 else c2
        c3 = (count if count < m3 else np.inf) if is3 else c3
        c4 = (count if count < m4 else np.inf) if is4 else c4
        c5 = (count if count < m5 else np.inf) if is5 else c5
    counts[0], counts[1], counts[2], counts[3], counts[4], counts[5] = c0, c1, c2, c3, c4, c5
