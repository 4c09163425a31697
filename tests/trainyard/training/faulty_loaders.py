"""Faulty loaders: they skip, repeat, swap or never leave a micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from trainyard.datasets.loader import Batch, _RankBatches
from trainyard.training.loop.data import RunData

T = TypeVar("T")

AT = 5
"""The micro-batch at which the fault happens: the second of step 2 in all of these runs."""


def skipping(batches: Iterator[T]) -> Iterator[T]:
    return (batch for k, batch in enumerate(batches) if k != AT)


def repeating(batches: Iterator[T]) -> Iterator[T]:
    for k, batch in enumerate(batches):
        yield from (batch,) * (1 + (k == AT - 1))


def swapping(batches: Iterator[T]) -> Iterator[T]:
    yield from itertools.islice(batches, AT)
    first, second = next(batches), next(batches)
    yield from (second, first)
    yield from batches


def sticking(batches: Iterator[T]) -> Iterator[T]:
    yield from itertools.islice(batches, AT)
    yield from itertools.repeat(next(batches))


Fault = Callable[[Iterator[Any]], Iterator[Any]]
FAULTS: dict[str, Fault] = {
    "skips": skipping,
    "repeats": repeating,
    "swaps": swapping,
    "sticks": sticking,
}


def inject_loader_fault(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, place: str, rank: int = 0
) -> None:
    """Make the loader of one data-parallel rank serve wrong batches."""
    indices, batches = _RankBatches.__iter__, RunData.train_batches

    def other_indices(self: _RankBatches) -> Iterator[list[int]]:
        return fault(indices(self)) if self.dp_rank == rank else indices(self)

    def other_batches(self: RunData, consumed: int) -> Iterator[Batch]:
        found = batches(self, consumed)
        return fault(found) if self.dp_rank == rank else found

    if place == "in front of the loader":
        monkeypatch.setattr(_RankBatches, "__iter__", other_indices)
    else:
        monkeypatch.setattr(RunData, "train_batches", other_batches)
