"""Which samples go to which rank in which micro-batch.

A sampler yields blocks of several micro-batches: (n, dp, micro batch size) sample indices, a row
for each data-parallel rank, after any number of consumed samples. It covers all ranks, so that the
ledger can record the samples of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError

BLOCK = 1 << 18
"""Samples of a block of those in order."""

Permutation = Callable[[int, int], NDArray[np.int64]]
"""(epoch, n) -> a permutation of n, the same for every process."""


@dataclass(frozen=True, slots=True)
class SamplerShape:
    """The sizes of a run that samplers need."""

    num_samples: int
    micro_batch_size: int
    dp: int

    def __post_init__(self) -> None:
        """Refuse data that does not fill one micro-batch on every rank."""
        if self.num_samples < self.per_step:
            raise ConfigError(
                f"{self.num_samples} samples do not fill one --micro-batch-size "
                f"{self.micro_batch_size} on each of {self.dp} data-parallel ranks; add documents"
            )

    @property
    def per_step(self) -> int:
        """Samples of one micro-batch of all ranks."""
        return self.micro_batch_size * self.dp


@dataclass(frozen=True, slots=True)
class WholeShare(Sequence[list[int]]):
    """Micro-batches of one rank; those of all ranks cover every sample once.

    The last one may be smaller, and ranks may have different numbers of them. They are made on
    access, since a set may be large."""

    num_samples: int
    micro_batch_size: int
    dp: int
    rank: int

    @property
    def _begins(self) -> range:
        return range(
            self.rank * self.micro_batch_size, self.num_samples, self.micro_batch_size * self.dp
        )

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, k: int) -> list[int]: ...

    @overload
    def __getitem__(self, k: slice) -> list[list[int]]: ...

    def __getitem__(self, k: int | slice) -> list[int] | list[list[int]]:
        if isinstance(k, slice):
            return [self[i] for i in range(len(self))[k]]
        begin = self._begins[k]
        return list(range(begin, min(begin + self.micro_batch_size, self.num_samples)))


def single(shape: SamplerShape, consumed: int) -> Iterator[NDArray[np.int64]]:
    """Samples in order, once; a last partial micro-batch is dropped."""
    end = consumed + (shape.num_samples - consumed) // shape.per_step * shape.per_step
    length = max(1, BLOCK // shape.per_step) * shape.per_step
    for first in range(consumed, end, length):
        numbers = np.arange(first, min(first + length, end), dtype=np.int64)
        yield numbers.reshape(-1, shape.dp, shape.micro_batch_size)


def cyclic(
    shape: SamplerShape, consumed: int, permutation: Permutation, data_sharding: bool = True
) -> Iterator[NDArray[np.int64]]:
    """Endless epochs, each shuffled again and a block.

    data_sharding: each rank owns a contiguous share and shuffles that; otherwise all shuffle
    together."""
    per_epoch = shape.num_samples // shape.per_step * shape.per_step
    while True:
        epoch, done = divmod(consumed, per_epoch)
        rows = (_sharded if data_sharding else _together)(shape, epoch, done, permutation)
        yield rows.reshape(shape.dp, -1, shape.micro_batch_size).swapaxes(0, 1)
        consumed = (epoch + 1) * per_epoch


def _sharded(
    shape: SamplerShape, epoch: int, done: int, permutation: Permutation
) -> NDArray[np.int64]:
    """(dp, rest of the epoch for each rank)"""
    share = shape.num_samples // shape.per_step * shape.micro_batch_size
    order = permutation(epoch, share)[done // shape.dp :]
    return order + np.arange(shape.dp, dtype=np.int64)[:, None] * share


def _together(
    shape: SamplerShape, epoch: int, done: int, permutation: Permutation
) -> NDArray[np.int64]:
    whole = shape.num_samples // shape.micro_batch_size * shape.micro_batch_size
    order = permutation(epoch, whole)[done:]
    each = len(order) // shape.per_step * shape.micro_batch_size
    return np.stack([order[rank :: shape.dp][:each] for rank in range(shape.dp)])
