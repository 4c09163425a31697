"""Samples of several datasets in given shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.sample_format import Dataset, Sample


class PrefetchableDataset(Dataset, Protocol):
    """A dataset that fetches announced samples ahead."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Say which samples will be asked for soon."""


S = TypeVar("S", bound=PrefetchableDataset)


class Blended(Generic[S]):
    """Sample i is sample `dataset_sample_index[i]` of dataset `dataset_index[i]`."""

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
        # Sorted once: a look at all samples for each of a thousand sources would be slow.
        order = np.argsort(self.dataset_index[indices], kind="stable")
        by_source = indices[order]
        sources, samples = self.dataset_index[by_source], self.dataset_sample_index[by_source]
        present, first = np.unique(sources, return_index=True)
        bounds = pairwise([*first.tolist(), len(samples)])
        numbers = np.empty_like(samples)
        for source, (begin, end) in zip(present.tolist(), bounds, strict=True):
            numbers[begin:end] = self.datasets[source].ids(samples[begin:end])[:, 1]
        ids = np.empty((len(indices), 2), np.int64)
        ids[order, 0] = sources
        ids[order, 1] = numbers
        return ids
