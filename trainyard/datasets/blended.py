"""Samples of several datasets in given shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.sample_format import Dataset, Sample


class SourceDataset(Dataset, Protocol):
    """A dataset that can be part of a blend: it fetches announced samples ahead."""

    def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.integer[Any]]:
        """(n,) the second column of `ids`. A slice has a begin and an end."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""


S = TypeVar("S", bound=SourceDataset)


class Blended(Generic[S]):
    """Sample i is sample `dataset_sample_index[i]` of dataset `dataset_index[i]`. Each dataset's
    samples come in turn, as `blend` makes them: 0, 1, 2 and so on."""

    def __init__(
        self,
        datasets: Sequence[S],
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        self.datasets = datasets
        self.dataset_index = dataset_index
        self.dataset_sample_index = dataset_sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> Sample:
        source, within = self.place(index)
        return source[within]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""
        for source, within in map(self.place, indices):
            source.prefetch([within])

    def place(self, index: int) -> tuple[S, int]:
        """The dataset of a sample, and its number there."""
        source = self.datasets[self.dataset_index.item(index)]
        return source, self.dataset_sample_index.item(index)

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): the source's number, and the sample's number in it."""
        if not len(indices):
            return np.empty((0, 2), np.int64)
        if len(indices) > len(self.datasets) and (np.diff(indices) == 1).all():
            return self._ids_in_turn(int(indices[0]), int(indices[-1]) + 1)
        # Sorted once: a look at all samples for each of a thousand sources would be slow.
        chosen = self.dataset_index[indices]
        order = np.argsort(chosen, kind="stable")
        # `take` on arrays in the cache is several times as fast as brackets on mapped ones.
        sources, samples = chosen.take(order), self.dataset_sample_index[indices].take(order)
        later = (np.flatnonzero(sources[1:] != sources[:-1]) + 1).tolist()
        numbers = [
            self.datasets[source].numbers(samples[begin:end])
            for source, begin, end in zip(
                sources[[0, *later]].tolist(), [0, *later], [*later, len(samples)], strict=True
            )
        ]
        ids = np.empty((len(indices), 2), np.int64)
        ids[:, 0] = chosen
        ids[order, 1] = np.concatenate(numbers)
        return ids

    def _ids_in_turn(self, begin: int, end: int) -> NDArray[np.int64]:
        """Those of [begin, end), in half the time: nothing has to be sorted, since the samples of
        each dataset follow its first."""
        chosen = self.dataset_index[begin:end].astype(np.intp)
        samples = self.dataset_sample_index[begin:end]
        counts = np.bincount(chosen, minlength=len(self.datasets))
        ends = np.zeros_like(counts)
        ends[chosen] = samples + 1  # of several values numpy keeps the last
        firsts = ends - counts
        numbers = [
            dataset.numbers(slice(first, end))
            for dataset, first, end in zip(
                self.datasets, firsts.tolist(), ends.tolist(), strict=True
            )
            if first < end
        ]
        # In `numbers`, those of a dataset end where those of the datasets up to it do.
        places = (np.cumsum(counts) - ends).take(chosen)
        places += samples
        ids = np.empty((len(chosen), 2), np.int64)
        ids[:, 0] = chosen
        ids[:, 1] = np.concatenate(numbers).take(places)
        return ids
