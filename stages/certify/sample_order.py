"""Computes the samples of each step of a run from the indices of its token files, if these are
available and unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stages.certify.config import CertifyConfig
from stages.certify.folder import CertifiedRun
from trainyard.artifacts import store
from trainyard.config import from_dict
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.index_cache import IN_MEMORY, IndexCache
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.sampler import SamplerShape
from trainyard.datasets.serving_order import Serving
from trainyard.errors import ConfigError, DataError
from trainyard.models.families import FAMILIES
from trainyard.training.loop.ledger import digest_samples
from trainyard.training.run.run_record import (
    CourseRecord,
    RunRecord,
    check_token_files,
    named_token_files,
)

ANY = 0
"""Value for the end-of-document token and vocabulary size, which do not decide the order."""

CHUNK = 1 << 16
"""Samples of a shuffled order that are drawn together: each start within an epoch is slow."""

Ints = NDArray[np.int64]


class DataUnavailable(Exception):  # noqa: N818  # a reason, not a fault
    """The reason why the samples cannot be computed."""


@dataclass(slots=True)
class SampleOrder:
    """Digests of the samples of steps, called in the order of the steps."""

    data: DataConfig
    dataset_of: Callable[[CourseRecord], GPTDataset | BlendedDataset]
    facts: RunRecord
    _dataset: GPTDataset | BlendedDataset | None = None
    _course: CourseRecord | None = None
    """The course of `_dataset`: the order depends on the length of the run."""
    _drawn: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _first: int = 0
    """Position of the first of `_drawn`."""
    _shape: SamplerShape | None = None

    def __call__(self, step: int, consumed: int, count: int) -> str | None:
        """Digest of `count` samples after `consumed`; None if they depend on the number of ranks,
        and that is not recorded."""
        span = self.facts.span(step)
        if span is None and self.data.dataloader_type != "single":
            return None
        course = self.facts.course(step)
        if course is not self._course or self._dataset is None:
            self._dataset, self._course, self._shape = self.dataset_of(course), course, None
        micro = course.training.micro_batch_size if span is None else span.micro_batch_size
        dp = 1 if span is None else span.data_parallel_size
        shape = SamplerShape(len(self._dataset), micro, dp)
        return digest_samples(self._dataset.ids(self._samples(shape, consumed, count)))

    def _samples(self, shape: SamplerShape, consumed: int, count: int) -> Ints:
        begin = consumed - self._first
        if shape != self._shape or begin < 0 or begin + count > len(self._drawn):
            serving = Serving(
                shape, shape.per_step, self.data.dataloader_type, self.data.data_sharding
            )
            self._drawn = serving.samples(consumed, max(count, CHUNK))
            self._first, self._shape, begin = consumed, shape, 0
        return self._drawn[begin : begin + count]


def sample_order(config: CertifyConfig, folder: CertifiedRun, facts: RunRecord) -> SampleOrder:
    """The order of a run's samples. Raises DataUnavailable without the data."""
    provided = folder.made_of.get("provided", {})
    if "dataset_provider" in provided:
        raise DataUnavailable(f"a program provided the data ({provided['dataset_provider']})")
    if folder.options.get("dataloader_type") == "external":
        raise DataUnavailable("--dataloader-type external: only its loader knows the order")
    if not FAMILIES[folder.options.get("model_type", "gpt")].of_documents:
        raise DataUnavailable(
            f"--model-type {folder.options['model_type']}: the order of samples of sentences is "
            "not computed again"
        )
    if folder.options.get("sft"):
        raise DataUnavailable("--sft: the order of instruction data is not computed again")
    data = _data(config, folder)
    cache = config.data_cache_path
    indexer = IN_MEMORY if cache is None else IndexCache(cache, read_only=True)
    form = SampleFormat(facts.seq_length, facts.seed, vocab_size=ANY, eod=ANY)

    def dataset_of(course: CourseRecord) -> GPTDataset | BlendedDataset:
        length = facts.length(course)
        built = build_datasets(data, form, (length.samples, 0, 0), indexer, length.consumed).train
        assert isinstance(built, GPTDataset | BlendedDataset)
        return built

    return SampleOrder(data, dataset_of, facts)


def _data(config: CertifyConfig, folder: CertifiedRun) -> DataConfig:
    """The run's options, with the paths of token files from the options, else the manifest."""
    document = folder.options_of(DataConfig)
    given = {name: list(getattr(config, name)) for name in ("data_path", "train_data_path")}
    given = {name: paths for name, paths in given.items() if paths}
    listed = {} if folder.manifest is None else named_token_files(folder.manifest)
    if not given and not listed and not document.get("mock_data"):
        raise DataUnavailable("data not available; give --data-path")
    data = from_dict(DataConfig, {**document, **(given or listed)}, "the options of the run")
    if not given:
        for source in data.sources("train"):
            if not store.exists(f"{source.prefix}.idx"):
                raise DataUnavailable(
                    f"data not available: {source.prefix}.idx does not exist; give its present "
                    "path with --data-path"
                )
    if config.check_data:
        try:
            check_token_files(data, folder.made_of["inputs"], folder.url, "--no-check-data")
        except (DataError, ConfigError) as error:
            if given:
                raise
            raise DataUnavailable(f"data has changed: {error}") from error
    return data
