"""Which dataset each sample of a blend comes from.

Greedy, as Megatron-LM: sample i goes to the dataset that lags furthest behind its share of the i
samples so far; the first one wins a tie. Pure functions of weights and sizes, bit-equal to that
rule.

The rule looks sequential, yet forgets: two runs of it that start from different counts soon agree.
So the samples are cut into lanes that all walk at once, each from guessed counts some steps before
its start; where a lane ends is where the next one must begin, and lanes that began wrong walk
again. When none did, the result is the rule's.

Few datasets can be chosen in a few steps, since a lag grows by no more than a share a step. So a
lane looks only at these, and at all datasets once in a block of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError

MAX_DATASETS = np.iinfo(np.int16).max

MOST_LANES = 4096
MANY_LANES = 256
"""With fewer lanes, a numpy call takes nearly as long."""
CACHED_CELLS = 1 << 15
"""Lanes times datasets, of more than NARROW datasets: arrays of so many fit the cache of a core."""
MOST_CELLS = 1 << 18
"""Lanes times datasets: bounds the memory."""
MIN_LANE_STEPS = 256
WARM_UP = 8
"""Share of a lane, as a divisor, that it walks before its start at most."""

FEW_DATASETS = 300
"""So many are looked at in each step: choosing among them would cost as much or more (measured with
100 to 800 datasets)."""
BLOCK_STEPS = 64
"""Steps between two looks at all datasets, if they are few; else twice the square root of their
number: the look costs as much as the steps in between."""

NARROW = 32
"""Up to this many datasets `_walk_narrow` is faster (measured with 2 to 64 datasets)."""

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


def blend(weights: list[float], num_samples: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset_index, dataset_sample_index), (n,) each, for datasets of unlimited size.

    weights: relative shares; the n samples keep within one of each share throughout."""
    shares = normalise(weights)
    return _assign(shares, num_samples, np.full(len(shares), np.inf))


def blend_exhaustive(sizes: list[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The same, serving every sample of every dataset once, each dataset in proportion to its
    size."""
    limits = np.asarray(sizes, np.float64)
    return _assign(normalise(limits.tolist()), sum(sizes), limits)


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


# --- the rule, many lanes at once -------------------------------------------------------------


def _assign(
    shares: Floats, num_samples: int, limits: Floats
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(n,) the dataset of each sample, and how many earlier samples came from it; a dataset that
    reached its limit is not chosen again."""
    steps = _lane_steps(len(shares), num_samples)
    starts = np.arange(0, num_samples, steps)
    chosen = np.empty((len(starts), steps), np.int16)
    ranks = np.empty((len(starts), steps), np.int64)
    walk = _Walk(shares, limits)
    begins = walk.begins(starts, steps)
    lanes = np.arange(len(starts))
    ends = np.empty_like(begins)
    while len(lanes):
        ends[lanes] = walk.all(starts[lanes], begins[lanes], steps, chosen, ranks, lanes)
        lanes = 1 + np.flatnonzero((begins[1:] != ends[:-1]).any(axis=1))
        begins[lanes] = ends[lanes - 1]
    return chosen.ravel()[:num_samples], ranks.ravel()[:num_samples]


def _lane_steps(num_datasets: int, num_samples: int) -> int:
    """Steps of a lane. There are no more lanes than make numpy fast: each may begin wrong, and
    walks more before its start."""
    wanted = max(MANY_LANES, CACHED_CELLS // num_datasets)
    wanted = MOST_LANES if num_datasets <= NARROW else wanted
    most = min(wanted, MOST_CELLS // num_datasets, num_samples // MIN_LANE_STEPS)
    return max(1, -(-num_samples // max(1, most)))


def _guess_counts(shares: Floats, starts: NDArray[np.int64]) -> Counts:
    """(lanes, datasets) counts near those at each start, summing to it."""
    wanted = shares * starts[:, None]
    counts = np.floor(wanted).astype(np.int64)
    missing = starts - counts.sum(axis=1)
    by_need = np.argsort(counts - wanted, axis=1, kind="stable")
    lanes, datasets = np.nonzero(np.arange(len(shares)) < missing[:, None])
    counts[lanes, by_need[lanes, datasets]] += 1
    return counts


@dataclass(frozen=True, slots=True)
class _Walk:
    """Lanes that walk by the rule, side by side."""

    shares: Floats
    limits: Floats
    """Most samples of each dataset; infinite: any number."""

    def begins(self, starts: NDArray[np.int64], steps: int) -> Counts:
        """(lanes, datasets) counts at each start, right where the rule forgets soon enough."""
        to_forget = 4.0 / float(self.shares[self.shares > 0].min())
        warm_up = int(min(to_forget, steps / WARM_UP)) if len(starts) > 1 else 0
        befores = np.maximum(starts - warm_up, 0)
        counts = _guess_counts(self.shares, befores)
        counts[1:] = self.all(befores[1:], counts[1:], warm_up)
        return counts

    def all(
        self,
        starts: NDArray[np.int64],
        counts: Counts,
        steps: int,
        chosen: NDArray[np.int16] | None = None,
        ranks: NDArray[np.int64] | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> Counts:
        """Walk from the counts at each start; returns those at the ends. chosen, ranks: filled in
        these rows, (lanes, steps)."""
        have = counts.astype(np.float64)
        num_datasets = len(self.shares)
        block = BLOCK_STEPS if num_datasets <= FEW_DATASETS else int(2 * num_datasets**0.5)
        for at in range(0, steps, block):
            length = min(block, steps - at)
            near = self._near(starts + at, have, length)
            found = self._block(starts + at, have, near, length)
            if chosen is not None and ranks is not None:
                chosen[rows, at : at + length] = found[0].T
                ranks[rows, at : at + length] = found[1].T
        return have.astype(np.int64)

    def _near(
        self, starts: NDArray[np.int64], have: Floats, steps: int
    ) -> NDArray[np.int64] | None:
        """(lanes, k) the datasets that the next steps may choose, and perhaps some more, in order;
        None: all.

        Of the `steps` + 1 that lag most now, one is not chosen in any of these steps. So none is
        chosen that will lag less at their end than that one does now."""
        num_datasets = len(self.shares)
        if num_datasets <= max(FEW_DATASETS, steps + 1):
            return None
        lag = self.shares * starts[:, None]
        lag -= have
        lag[have >= self.limits] = -np.inf
        least = np.partition(lag, num_datasets - steps - 1, axis=1)[:, num_datasets - steps - 1]
        lag += self.shares * (steps + 1)
        rounding = 1e-9 + 1e-14 * float(starts[-1] + steps)
        count = int((lag >= least[:, None] - rounding).sum(axis=1).max())
        near = np.argpartition(lag, num_datasets - count, axis=1)[:, num_datasets - count :]
        near.sort(axis=1)
        return near

    def _block(
        self, starts: NDArray[np.int64], have: Floats, near: NDArray[np.int64] | None, steps: int
    ) -> tuple[NDArray[np.int16], Floats]:
        """(steps, lanes) which dataset is chosen in each step, and its count before; changes
        `have`. near: the only ones to look at; None: all."""
        counts, shares, limits = have, self.shares, self.limits
        if near is not None:
            counts = np.ascontiguousarray(np.take_along_axis(have, near, axis=1))
            shares, limits = shares[near], limits[near]
        bounds = limits if (counts + steps > limits).any() else None
        walk = _walk_narrow if len(self.shares) <= NARROW else _walk_wide
        chosen, ranks = walk(shares, counts, bounds, starts, steps)
        if near is None:
            return chosen, ranks
        np.put_along_axis(have, near, counts, axis=1)
        return np.take_along_axis(near.T, chosen, axis=0).astype(np.int16), ranks


def _walk_wide(
    shares: Floats, counts: Floats, limits: Floats | None, starts: NDArray[np.int64], steps: int
) -> tuple[NDArray[np.int16], Floats]:
    """(steps, lanes) which column of `counts` (lanes, columns) the rule takes in each step, and its
    count before; changes `counts`. shares, limits: of each column, or of each in each lane."""
    lanes, width = counts.shape
    # Arrays of one shape: numpy multiplies by a broadcast one at half the speed.
    shares, so_far = (
        np.ascontiguousarray(np.broadcast_to(each, counts.shape), np.float64)
        for each in (shares, starts[:, None])
    )
    lag, flat = np.empty_like(counts), counts.reshape(-1)
    best, of_lane = np.empty(lanes, np.intp), np.arange(lanes) * width
    chosen, ranks = np.empty((steps, lanes), np.int16), np.empty((steps, lanes))
    for step in range(steps):
        np.multiply(shares, so_far if step else np.maximum(so_far, 1.0), out=lag)
        np.subtract(lag, counts, out=lag)
        if limits is not None:
            lag[counts >= limits] = -np.inf
        lag.argmax(axis=1, out=best)  # the first of equals
        chosen[step] = best
        best += of_lane
        ranks[step] = flat.take(best)
        flat[best] = ranks[step] + 1.0
        so_far += 1.0
    return chosen, ranks


def _walk_narrow(
    shares: Floats, counts: Floats, limits: Floats | None, starts: NDArray[np.int64], steps: int
) -> tuple[NDArray[np.int16], Floats]:
    """The same, faster for few columns: side by side are the lanes, not the columns."""
    lanes, width = counts.shape
    # The first of equals has the highest mark.
    marks = np.arange(width, 0, -1).astype(np.uint8)[:, None]
    shares, now = shares[:, None], np.ascontiguousarray(counts.T)
    lag, is_most = np.empty_like(now), np.empty(now.shape, np.bool_)
    marked = np.empty(now.shape, marks.dtype)
    flat, places = now.reshape(-1), np.empty(lanes, np.intp)
    so_far, of_lane = starts.astype(np.float64), np.arange(lanes)
    chosen, ranks = np.empty((steps, lanes), np.int16), np.empty((steps, lanes))
    for step in range(steps):
        np.multiply(shares, np.maximum(so_far, 1.0), out=lag)
        np.subtract(lag, now, out=lag)
        if limits is not None:
            lag[now >= limits[:, None]] = -np.inf
        np.equal(lag, lag.max(axis=0), out=is_most)
        np.multiply(is_most.view(np.uint8), marks, out=marked)
        np.subtract(width, marked.max(axis=0), out=chosen[step], casting="unsafe")
        np.multiply(chosen[step], lanes, out=places, casting="unsafe", dtype=np.intp)
        places += of_lane
        ranks[step] = flat.take(places)
        flat[places] = ranks[step] + 1.0
        so_far += 1.0
    counts[:] = now.T
    return chosen, ranks
