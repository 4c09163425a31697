"""Which dataset each sample of a blend comes from.

Greedy, as Megatron-LM: sample i goes to the dataset that lags furthest behind its share of the i
samples so far; the first one wins a tie. Pure functions of weights and sizes, bit-equal to that
rule.

The rule looks sequential, yet forgets: two runs of it that start from different counts soon agree.
So the samples are cut into lanes that all walk at once from guessed counts; where a lane ends is
where the next one must begin, and lanes that guessed wrong walk again. When no guess was wrong, the
result is the rule's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError

MAX_DATASETS = np.iinfo(np.int16).max
MIN_LANE_STEPS = 256
MAX_ROUNDS = 4

Counts = NDArray[np.int64]


def blend(weights: list[float], num_samples: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset_index, dataset_sample_index), (n,) each, for datasets of unlimited size.

    weights: relative shares; the n samples keep within one of each share throughout."""
    shares = normalise(weights)
    chosen = _assign(shares, num_samples, np.full(len(shares), np.inf))
    return chosen, rank_within(chosen, len(shares))


def blend_exhaustive(sizes: list[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The same, serving every sample of every dataset once, each dataset in proportion to its
    size."""
    limits = np.asarray(sizes, np.float64)
    chosen = _assign(normalise(limits.tolist()), sum(sizes), limits)
    return chosen, rank_within(chosen, len(sizes))


def normalise(weights: list[float]) -> NDArray[np.float64]:
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
    shares: NDArray[np.float64] = values / values.sum()
    return shares


def rank_within(chosen: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """(n,) how many earlier samples came from the same dataset."""
    counts = np.bincount(chosen, minlength=num_datasets)
    starts = np.cumsum(counts) - counts
    ranks = np.empty(len(chosen), np.int64)
    ranks[np.argsort(chosen, kind="stable")] = np.arange(len(chosen)) - np.repeat(starts, counts)
    return ranks


# --- the rule, many lanes at once -------------------------------------------------------------


def _assign(
    shares: NDArray[np.float64], num_samples: int, limits: NDArray[np.float64]
) -> NDArray[np.int16]:
    """(n,) the dataset of each sample; one that reached its limit is not chosen again."""
    steps = _lane_steps(shares, num_samples)
    starts = np.arange(0, num_samples, steps)
    counts = _guess_counts(shares, starts)
    for _ in range(MAX_ROUNDS):
        chosen, ends = _walk(shares, limits, starts, counts, steps)
        wrong = (counts[1:] != ends[:-1]).any(axis=1)
        if not wrong.any():
            return chosen.ravel()[:num_samples]
        counts[1:] = ends[:-1]
    return _walk(shares, limits, starts[:1], counts[:1], num_samples)[0].ravel()


def _lane_steps(shares: NDArray[np.float64], num_samples: int) -> int:
    """Steps of a lane: enough for the rarest dataset to occur a few times, as forgetting needs."""
    to_forget = min(4.0 / float(shares[shares > 0].min()), num_samples / 64)
    steps = max(MIN_LANE_STEPS, int(num_samples**0.5), int(to_forget))
    return max(1, min(steps, num_samples))


def _guess_counts(shares: NDArray[np.float64], starts: NDArray[np.int64]) -> Counts:
    """(lanes, datasets) counts near those at each start, summing to it."""
    wanted = shares * starts[:, None]
    counts = np.floor(wanted).astype(np.int64)
    missing = starts - counts.sum(axis=1)
    by_need = np.argsort(counts - wanted, axis=1, kind="stable")
    lanes, datasets = np.nonzero(np.arange(len(shares)) < missing[:, None])
    counts[lanes, by_need[lanes, datasets]] += 1
    return counts


def _walk(
    shares: NDArray[np.float64],
    limits: NDArray[np.float64],
    starts: NDArray[np.int64],
    counts: Counts,
    steps: int,
) -> tuple[NDArray[np.int16], Counts]:
    """(lanes, steps) choices of every lane from its start, and the counts at its end."""
    lanes = np.arange(len(starts))
    chosen = np.empty((steps, len(starts)), np.int16)
    have = counts.astype(np.float64)
    lag = np.empty_like(have)
    bounded = bool(np.isfinite(limits).any())
    for step in range(steps):
        so_far = np.maximum(starts + step, 1).astype(np.float64)
        np.multiply(so_far[:, None], shares, out=lag)
        np.subtract(lag, have, out=lag)
        if bounded:
            lag[have >= limits] = -np.inf
        best = lag.argmax(axis=1)
        chosen[step] = best
        have[lanes, best] += 1.0
    return chosen.T, have.astype(np.int64)
