"""Datasets that a calling program brings along, in place of token files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.config import DataConfig
from trainyard.datasets.sample_format import Dataset, Sample
from trainyard.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidedData(DataConfig):
    """Data that a `dataset_provider` makes: no paths, only how samples are loaded and in what
    order they are taken."""

    def _check_one_kind(self) -> None:
        """Refuse a place for data that is not to be read."""
        given = [flag for flag, paths in self._paths().items() if paths]
        lists = {
            "--data-args-path": self.data_args_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--mock-data": self.mock_data,
        }
        given += [flag for flag, value in lists.items() if value]
        if given:
            raise ConfigError(
                f"{' and '.join(given)}: the data is that of the dataset_provider; take DataConfig "
                "for token files"
            )


class Samples(Protocol):
    """The least of a dataset: samples by number."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Arrays by name; `loss_mask` (s,) is one of them."""


class AsDataset:
    """Samples as a dataset: arrays of numpy, an id for the ledger, and errors that say which."""

    def __init__(
        self, samples: Samples, name: str, check: Callable[[Sample, str], None] | None = None
    ) -> None:
        """check: looks at a sample, given what to call it."""
        self._samples, self._name, self._check = samples, name, check

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        sample = {key: np.asarray(value) for key, value in self._samples[index].items()}
        if self._check is not None:
            self._check(sample, f"{self._name}: sample {index}")
        return sample

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the dataset if it has any, else 0 and the number of the sample."""
        own = getattr(self._samples, "ids", None)
        if own is not None:
            found: NDArray[np.int64] = np.asarray(own(indices), np.int64)
            if found.shape != (len(indices), 2):
                raise DataError(
                    f"{self._name}: ids of {len(indices)} samples gave an array of shape "
                    f"{found.shape}; give ({len(indices)}, 2), a source and a number for each"
                )
            return found
        return np.stack([np.zeros_like(indices), indices], axis=1)


def as_dataset(
    samples: Samples, name: str, check: Callable[[Sample, str], None] | None = None
) -> Dataset:
    """What the loader and the ledger can take."""
    return AsDataset(samples, name, check)
