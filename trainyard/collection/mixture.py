"""Which documents a mixture has, how often, and in which order: pure functions of hashes.

2.3 epochs of a source are every document twice, and 0.3 of them a third time, chosen by a hash of
their text. Shape: n documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainyard.collection.duplicates.minhash import MULTIPLIER, mixed

Array = npt.NDArray[Any]

BINS = 1024
"""Parts of a source, by hash: how well the size of a part of an epoch is known beforehand."""

SAMPLING = np.uint64(0x5851F42D4C957F2D)
"""Makes the choice of documents independent of their order."""


def bins_of(hashes: Array) -> Array:
    """(n,) the bin of each document."""
    return (_samples(hashes) >> np.uint64(54)).astype(np.int64)


def _samples(hashes: Array) -> Array:
    return mixed(hashes ^ SAMPLING)


def threshold(bins: Array, part: float) -> int:
    """Documents with a sample below it make up this part of an epoch. bins: (BINS,) sizes.

    Inside of one bin, documents are taken to lie evenly."""
    wanted = part * float(bins.sum())
    ends = np.cumsum(bins)
    last = int(np.searchsorted(ends, wanted, "left"))
    if last >= BINS:
        return 1 << 64
    before = float(ends[last] - bins[last])
    inside = (wanted - before) / float(bins[last]) if bins[last] else 0.0
    return min(int((last + inside) * ((1 << 64) // BINS)), 1 << 64)


def copies_of(hashes: Array, epochs: float, limit: int) -> Array:
    """(n,) how often each document appears. limit: the threshold of the last, partial epoch."""
    whole = np.full(len(hashes), int(epochs), np.int64)
    if limit >= 1 << 64:
        return whole + 1
    return whole + (_samples(hashes) < np.uint64(limit))


def order_keys(hashes: Array, copy: int) -> Array:
    """(n,) u64: where a copy of each document stands in the mixture, which is sorted by it."""
    return mixed(mixed(hashes + np.uint64(copy)) * MULTIPLIER)


def shards_of(keys: Array, num_shards: int) -> Array:
    """(n,) the shard of each key: shards are ranges of keys, so their number changes no order."""
    return ((keys >> np.uint64(32)) * np.uint64(num_shards) >> np.uint64(32)).astype(np.int64)
