"""Builds the training, validation and test data of a run from its options."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainyard.artifacts.inputs import Manifests
from trainyard.datasets.blend import normalise
from trainyard.datasets.config import DataConfig, Source, has_weights
from trainyard.datasets.formats import (
    Built,
    Format,
    InstructionFormat,
    OneSource,
    blend,
    open_dataset,
    open_source,
)
from trainyard.datasets.formats import Source as SourceFile
from trainyard.datasets.index_cache import IN_MEMORY, Indexer
from trainyard.datasets.mock import MockTokens
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.splits import TooLittleDataError, sources_of
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)


Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Datasets:
    """The data of a run; splits that are not requested are None or empty."""

    train: Built | None
    valid: tuple[tuple[str, Built], ...]
    """Each set with its name: one, or with --multiple-validation-sets one for each prefix."""
    test: tuple[tuple[str, Built], ...]
    """The same for the test data."""
    untested: str = ""
    """Why there is no test data, if --split has a part for it but too few documents."""


def build_gpt_datasets(
    data: DataConfig,
    sample_format: Format,
    sizes: tuple[int, int, int],
    indexer: Indexer = IN_MEMORY,
) -> tuple[Built | None, Built | None, Built | None]:
    """As `build_datasets`, for a run with one set of validation data."""
    if data.multiple_validation_sets:
        raise ConfigError("--multiple-validation-sets: this takes one set of validation data")
    built = build_datasets(data, sample_format, sizes, indexer)
    valid, test = (sets[0][1] if sets else None for sets in (built.valid, built.test))
    return built.train, valid, test


def build_datasets(
    data: DataConfig,
    sample_format: Format,
    sizes: tuple[int, int, int],
    indexer: Indexer = IN_MEMORY,
    num_consumed: int = 0,
) -> Datasets:
    """Training, validation and test data of at least the given numbers of samples, none for 0.

    With --full-validation a validation set is one epoch of its data, for any requested number;
    with --multiple-validation-sets each set has that number. Test data without weights is at most
    one epoch. There is none without a path or part of --split for it, or if that part is less than
    a sample.

    num_consumed: training samples that all steps take. If the data for the requested number has
    fewer, data for `num_consumed` samples is built instead; otherwise only the requested number
    affects the order.

    indexer: source of the indices, `index_cache.IndexCache` for --data-cache-path.

    Raises ConfigError if another split that is needed has no documents or too few tokens."""
    builder = _Builder(data.expanded(), sample_format, indexer)
    train = builder.split("train", sizes[0]) if sizes[0] else None
    if train is not None and data.dataloader_type == "single" and len(train) < num_consumed:
        train = builder.split("train", num_consumed)
    valid = tuple(builder.sets("valid", sizes[1])) if sizes[1] else ()
    return Datasets(train, valid, *(builder.test(sizes[2]) if sizes[2] else ((), "")))


class _Builder:
    """Opens each file once for all splits."""

    def __init__(self, data: DataConfig, sample_format: Format, indexer: Indexer) -> None:
        self._data = data
        self._form = sample_format
        self._indexer = indexer
        self._opened: dict[str, SourceFile] = {}
        self._manifests = Manifests()
        self._num_sources = 1

    def split(self, split: str, size: int | None) -> Built:
        """All data of a split; a size of None is one epoch."""
        if self._data.mock_data:
            return self._mock(split, size)
        sources = self._sources(split)
        # A single prefix with a weight is a blend of one, except with a path for each split.
        if len(sources) == 1 and (sources[0].weight is None or not self._data.data_path):
            if split == "train" and self._repeats_epochs():
                size = None
            return self._dataset(split, size, sources[0])
        if has_weights(sources) and size is not None:
            return self._blend_by_weight(split, size, sources)
        return self._blend_by_size(split, size, sources)

    def _repeats_epochs(self) -> bool:
        """Whether the sampler shuffles the records of a file in every epoch. A dataset of more than
        one epoch would be shuffled as a whole, and one of less would never show the last ones."""
        is_cyclic = self._data.dataloader_type == "cyclic"
        return is_cyclic and isinstance(self._form, InstructionFormat)

    def sets(self, split: str, size: int) -> Iterator[tuple[str, Built]]:
        """The sets of the validation or test data."""
        wanted = None if self._data.full_validation and split == "valid" else size
        if not self._data.multiple_validation_sets or self._data.mock_data:
            yield split, self.split(split, wanted)
            return
        sources = self._sources(split)
        for name, source in zip(set_names(sources), sources, strict=True):
            yield name, self._dataset(split, wanted, source)

    def test(self, size: int) -> tuple[tuple[tuple[str, Built], ...], str]:
        """The sets of the test data, or why there are none.

        The part that --split leaves for them, a thousandth by default, may be empty; the run
        continues without test data."""
        data = self._data
        begin, end = data.fractions("test")
        if begin == end or not (data.mock_data or data.sources("test")):
            return (), ""
        try:
            return tuple(self.sets("test", size)), ""
        except TooLittleDataError as error:
            if not data.data_path:
                raise
            return (), str(error)

    # --- blends -----------------------------------------------------------------------------

    def _blend_by_size(self, split: str, size: int | None, sources: list[Source]) -> Built:
        """No weights: one epoch of each, in proportion to what it holds."""
        datasets = self._each(lambda source: self._dataset(split, None, source), sources)
        sizes = [len(dataset) for dataset in datasets]
        if split == "test" and size is not None:  # measured once, so fewer samples suffice
            size = min(size, sum(sizes))
        if size is not None and size > sum(sizes):
            raise ConfigError(
                f"--data-path without weights is one epoch, {sum(sizes)} {split} samples, but the "
                f"run needs {size}; give weights, or train for less"
            )
        if size is None or size == sum(sizes):
            return blend(datasets, *self._indexer.blend_exhaustive(sizes))
        return blend(datasets, *self._indexer.blend([float(n) for n in sizes], size))

    def _blend_by_weight(self, split: str, size: int, sources: list[Source]) -> Built:
        weights = normalise([source.weight or 0.0 for source in sources]).tolist()
        shares = [math.ceil(size * weight) for weight in weights]
        surplus = 1 + self._data.mid_level_dataset_surplus
        wanted = [math.ceil(share * surplus) for share in shares]
        pairs = list(zip(wanted, sources, strict=True))
        datasets = self._each(lambda pair: self._dataset(split, *pair), pairs)
        # The sum of the shares, each rounded up: the cyclic order depends on it.
        index, sample = self._indexer.blend(weights, sum(shares))
        served = np.bincount(index, minlength=len(datasets))
        for source, dataset, count in zip(sources, datasets, served.tolist(), strict=True):
            if count > len(dataset):
                raise ConfigError(
                    f"{source.prefix}: the blend takes {count} {split} samples of it, but only "
                    f"{len(dataset)} were built; raise --mid-level-dataset-surplus "
                    f"{self._data.mid_level_dataset_surplus}"
                )
        return blend(datasets, index, sample)

    def _each(self, make: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
        threads = min(self._data.num_dataset_builder_threads, len(items))
        if threads <= 1:
            return [make(item) for item in items]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(make, items))

    # --- one source -------------------------------------------------------------------------

    def _sources(self, split: str) -> list[Source]:
        sources = sources_of(self._data, split)
        self._num_sources = len(sources)
        return sources

    def _dataset(self, split: str, size: int | None, source: Source) -> OneSource:
        file = self._opened.get(source.prefix)
        if file is None:
            file = open_source(
                source.prefix,
                self._data,
                self._form,
                self._num_sources,
                self._indexer,
                self._manifests,
            )
            self._opened[source.prefix] = file
        return self._over(file, split, size)

    def _mock(self, split: str, size: int | None) -> OneSource:
        sample_format, wanted = self._form, self._data.dataset_size
        assert isinstance(sample_format, SampleFormat), "made-up data has no text"
        tokens = (
            None
            if wanted is None
            else wanted * sample_format.seq_length + int(sample_format.extra_token)
        )
        if "" not in self._opened:
            self._opened[""] = MockTokens(
                sample_format.vocab_size, sample_format.eod, tokens_of_a_third=tokens
            )
        return self._over(self._opened[""], split, size)

    def _over(self, file: SourceFile, split: str, size: int | None) -> OneSource:
        dataset = open_dataset(file, self._data, self._form, split, size, self._indexer)
        log.debug("dataset split=%s samples=%d", split, len(dataset))
        return dataset


def set_names(sources: Sequence[Source]) -> list[str]:
    """A name for each source: the end of its prefix if that is unique, else the prefix; a repeated
    prefix also has its number."""
    ends = [source.prefix.rstrip("/").rsplit("/", 1)[-1] for source in sources]
    names = [
        end if Counter(ends)[end] == 1 else source.prefix
        for end, source in zip(ends, sources, strict=True)
    ]
    return [
        name if Counter(names)[name] == 1 else f"{name}#{number}"
        for number, name in enumerate(names)
    ]
