"""Which samples each step of a run had, worked out from the token files' indices: where they are at
hand, and are those that the run was made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stages.certify.config import CertifyConfig
from stages.certify.folder import RunFolder
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
from trainyard.training.loop.ledger import digest_samples
from trainyard.training.run.run_record import RunRecord, check_token_files, named_token_files

ANY = 0
"""Stands for the end of document and the vocabulary: they shape samples, not which they are."""

AT_ONCE = 1 << 16
"""Samples of a shuffled order that are drawn together: to begin in an epoch takes long."""

Ints = NDArray[np.int64]


class NotAtHand(Exception):  # noqa: N818  # a reason, no fault
    """Why the samples cannot be worked out."""


@dataclass(slots=True)
class SampleOrder:
    """Digests of what steps are made of, asked for in the order of the steps."""

    data: DataConfig
    dataset: GPTDataset | BlendedDataset
    facts: RunRecord
    _drawn: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _first: int = 0
    """Place of the first of `_drawn`."""
    _shape: SamplerShape | None = None

    def __call__(self, step: int, consumed: int, count: int) -> str | None:
        """Of `count` samples after `consumed`; None where the number of ranks decides which these
        are, and is not recorded."""
        span = self.facts.span(step)
        if span is None and self.data.dataloader_type != "single":
            return None
        micro = self.facts.training.micro_batch_size if span is None else span.micro_batch_size
        dp = 1 if span is None else span.data_parallel_size
        shape = SamplerShape(len(self.dataset), micro, dp)
        return digest_samples(self.dataset.ids(self._samples(shape, consumed, count)))

    def _samples(self, shape: SamplerShape, consumed: int, count: int) -> Ints:
        begin = consumed - self._first
        if shape != self._shape or begin < 0 or begin + count > len(self._drawn):
            serving = Serving(
                shape, shape.per_step, self.data.dataloader_type, self.data.data_sharding
            )
            self._drawn = serving.samples(consumed, max(count, AT_ONCE))
            self._first, self._shape, begin = consumed, shape, 0
        return self._drawn[begin : begin + count]


def sample_order(config: CertifyConfig, folder: RunFolder, facts: RunRecord) -> SampleOrder:
    """The order of a run's samples. Raises NotAtHand where the data is not."""
    provided = folder.made_of.get("provided", {})
    if "dataset_provider" in provided:
        raise NotAtHand(f"a program provided the data ({provided['dataset_provider']})")
    if folder.options.get("dataloader_type") == "external":
        raise NotAtHand("--dataloader-type external: only its loader knows the order")
    data = _data(config, folder)
    cache = config.data_cache_path
    indexer = IN_MEMORY if cache is None else IndexCache(cache, read_only=True)
    form = SampleFormat(facts.seq_length, facts.training.seed, vocab_size=ANY, eod=ANY)
    length = facts.length
    dataset = build_datasets(data, form, (length.samples, 0, 0), indexer, length.consumed).train
    assert dataset is not None
    return SampleOrder(data, dataset, facts)


def _data(config: CertifyConfig, folder: RunFolder) -> DataConfig:
    """The run's options with the places of its token files: as given, else as the run tells."""
    document = folder.options_of(DataConfig)
    given = {name: list(getattr(config, name)) for name in ("data_path", "train_data_path")}
    given = {name: paths for name, paths in given.items() if paths}
    told = {} if folder.manifest is None else named_token_files(folder.manifest)
    if not given and not told and not document.get("mock_data"):
        raise NotAtHand("data not at hand; --data-path tells where it lies")
    data = from_dict(DataConfig, {**document, **(given or told)}, "the options of the run")
    if not given:
        for source in data.sources("train"):
            if not store.exists(f"{source.prefix}.idx"):
                raise NotAtHand(
                    f"data not at hand: {source.prefix}.idx is not there; --data-path tells where "
                    "it lies now"
                )
    if config.check_data:
        _check(data, folder, bool(given))
    return data


def _check(data: DataConfig, folder: RunFolder, is_given: bool) -> None:
    try:
        check_token_files(data, folder.made_of["inputs"], folder.url, "--no-check-data")
    except (DataError, ConfigError) as error:
        if is_given:
            raise
        raise NotAtHand(f"data not at hand any more: {error}") from error
