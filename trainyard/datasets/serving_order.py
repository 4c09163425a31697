"""The order in which a run serves its samples: the step, micro-batch, rank and row of each.

A run serves one sample of its dataset at each place t, from 0. The order that torch shuffles for
--dataloader-type cyclic is computed here without torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.sampler import SamplerShape, cyclic
from trainyard.errors import ConfigError

MAX_CYCLIC = (2**32 - 1) // 20
"""From this number on, torch shuffles with other draws."""

CHUNK = 1 << 20

Ints = NDArray[np.int64]


class Place(NamedTuple):
    """Where in a run a sample was served. All but the step count from 0; None if not known."""

    step: int
    micro_batch: int | None
    rank: int | None
    row: int | None


@dataclass(frozen=True, slots=True)
class Serving:
    """The order in which a run serves its samples, for steps of one global batch size."""

    shape: SamplerShape
    global_batch_size: int
    dataloader_type: str = "single"
    data_sharding: bool = True
    first_step: int = 1
    """The first of these steps."""
    first_place: int = 0
    """Samples that earlier steps took."""

    def __post_init__(self) -> None:
        """Refuse a batch size that is not a multiple of the micro-batches, and unknown orders."""
        if self.global_batch_size % self.shape.per_step:
            raise ConfigError(
                f"--global-batch-size ({self.global_batch_size}) must be divisible by "
                f"--micro-batch-size ({self.shape.micro_batch_size}) x --data-parallel-size "
                f"({self.shape.dp})"
            )
        if self.dataloader_type == "external":
            raise ConfigError("--dataloader-type external: only its loader knows the order")
        if self.dataloader_type == "cyclic" and self.shape.num_samples >= MAX_CYCLIC:
            raise ConfigError(
                f"--dataloader-type cyclic: the order of {self.shape.num_samples} samples cannot "
                f"be computed without torch; the limit is {MAX_CYCLIC}"
            )

    def samples(self, first: int, count: int) -> Ints:
        """(count,) the samples at the places from `first` on; fewer if the order ends."""
        if self.dataloader_type == "single":
            whole = self.shape.num_samples // self.shape.per_step * self.shape.per_step
            return np.arange(first, min(first + count, whole), dtype=np.int64)
        # `cyclic` starts at the beginning of a micro-batch, and an epoch ends with a whole one.
        skipped = first % self.shape.per_step
        blocks = cyclic(self.shape, first - skipped, torch_permutation, self.data_sharding)
        drawn = [next(blocks).ravel()]
        while sum(map(len, drawn)) < skipped + count:
            drawn.append(next(blocks).ravel())
        return np.concatenate(drawn)[skipped : skipped + count]

    def step(self, number: int) -> Ints:
        """(global batch size,) the samples of a step, which count from 1."""
        return self.samples(self.begin(number), self.global_batch_size)

    def begin(self, number: int) -> int:
        """The place at which a step begins."""
        return self.first_place + (number - self.first_step) * self.global_batch_size

    def place(self, t: int) -> Place:
        """The Place in a run of the sample that is served at `t`."""
        step, within = divmod(t - self.first_place, self.global_batch_size)
        micro_batch, within = divmod(within, self.shape.per_step)
        rank, row = divmod(within, self.shape.micro_batch_size)
        return Place(self.first_step + step, micro_batch, rank, row)

    def places(self, samples: Ints, last_step: int) -> dict[int, list[Place]]:
        """Every place at which each sample is served up to this step."""
        first, count = self._places_to(last_step)
        found: dict[int, list[Place]] = {sample: [] for sample in samples.tolist()}
        if self.dataloader_type == "single":
            end = first + len(self.samples(first, count))
            order = ((t, t) for t in samples.tolist() if first <= t < end)
        else:
            served = _served(self, first, count)
            hits = np.flatnonzero(np.isin(served, samples)).tolist()
            order = ((first + k, int(served[k])) for k in hits)
        for t, sample in order:
            found[sample].append(self.place(t))
        return found

    def counts(self, samples: Ints, last_step: int) -> Ints:
        """(n,) the number of places at which each sample is served up to this step."""
        first, count = self._places_to(last_step)
        if self.dataloader_type == "single":
            end = first + len(self.samples(first, count))
            return ((first <= samples) & (samples < end)).astype(np.int64)
        served = _served(self, first, count)
        return np.bincount(served, minlength=self.shape.num_samples)[samples]

    def _places_to(self, last_step: int) -> tuple[int, int]:
        """The first place of the steps, and how many they have up to this one."""
        return self.first_place, self.begin(last_step + 1) - self.first_place


@lru_cache(maxsize=4)
def _served(serving: Serving, first: int, count: int) -> Ints:
    """The samples served from a place on; cached, as shuffling takes long."""
    return serving.samples(first, count)


@lru_cache(maxsize=1)  # steps of many sizes begin in the same epoch
def torch_permutation(epoch: int, n: int) -> Ints:
    """torch.randperm(n) by a generator seeded with `epoch`: Fisher-Yates from the front, drawing
    32 bits of mt19937 modulo the rest."""
    assert n < MAX_CYCLIC
    draws = np.random.RandomState(epoch % 2**32)
    order = array("q", range(n))
    for start in range(0, n - 1, CHUNK):
        left = np.arange(n - start, max(n - start - CHUNK, 1), -1, dtype=np.uint32)
        jumps = draws.randint(0, 2**32, len(left), dtype=np.uint32) % left
        for i, jump in enumerate(jumps.tolist(), start):
            order[i], order[i + jump] = order[i + jump], order[i]
    return np.array(order, np.int64)
