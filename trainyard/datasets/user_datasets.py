"""Datasets that a calling program passes in, instead of token files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.config import DataConfig
from trainyard.datasets.sample_format import Dataset, Sample, ids_in_one_source
from trainyard.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidedData(DataConfig):
    """Options for data from a `dataset_provider`: no paths, only the loading and order of
    samples."""

    def _check_one_kind(self) -> None:
        """Refuse options that name data."""
        given = [flag for flag, paths in self._paths().items() if paths]
        lists = {
            "--data-args-path": self.data_args_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--mock-data": self.mock_data,
        }
        given += [flag for flag, value in lists.items() if value]
        if given:
            raise ConfigError(
                f"{' and '.join(given)} cannot be given, as the dataset_provider makes the data; "
                "use DataConfig for token files"
            )


class Samples(Protocol):
    """The least interface of a dataset: samples by number."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Arrays by name; `loss_mask` (s,) is one of them."""


class AsDataset:
    """Samples as a dataset: numpy arrays, an id for the ledger, and errors that name the sample."""

    def __init__(
        self, samples: Samples, name: str, check: Callable[[Sample, str], None] | None = None
    ) -> None:
        """check: checks a sample; its second argument names the sample in messages."""
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
        return ids_in_one_source(indices)


def as_dataset(
    samples: Samples, name: str, check: Callable[[Sample, str], None] | None = None
) -> Dataset:
    """Wraps samples as a dataset for the loader and the ledger."""
    return AsDataset(samples, name, check)
