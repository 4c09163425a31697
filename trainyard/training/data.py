"""The datasets of a run as streams of micro-batches that begin anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainyard.datasets.build import build_gpt_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import Dataset, SampleFormat
from trainyard.datasets.loader import Batch, build_loader, sample_groups
from trainyard.datasets.sampler import SamplerShape
from trainyard.training.batch_size import BatchSize
from trainyard.training.config import TrainingConfig
from trainyard.training.ledger import digest_samples


@dataclass(frozen=True, slots=True)
class RunData:
    """Training and validation data of one rank."""

    config: DataConfig
    train: Dataset
    valid: Dataset | None
    batch_size: BatchSize
    dp_rank: int = 0

    def train_batches(self, consumed: int) -> Iterator[Batch]:
        """This rank's micro-batches after `consumed` samples of all ranks."""
        shape = self._shape(self.train)
        return build_loader(self.train, self.config, shape, consumed, self.dp_rank)

    def valid_batches(self, consumed: int) -> Iterator[Batch]:
        """The same of the validation data."""
        assert self.valid is not None
        shape = self._shape(self.valid)
        return build_loader(self.valid, self.config, shape, consumed, self.dp_rank)

    def step_digests(self, consumed: int) -> Iterator[str]:
        """Digest of the samples of each step, those of all ranks, after `consumed` samples."""
        groups = sample_groups(self.config, self._shape(self.train), consumed)
        while True:
            step = [next(groups).ravel() for _ in range(self.batch_size.num_microbatches)]
            yield digest_samples(self.train.ids(np.concatenate(step)))

    def _shape(self, dataset: Dataset) -> SamplerShape:
        return SamplerShape(len(dataset), self.batch_size.micro_batch_size, self.batch_size.dp)


def build_run_data(
    data: DataConfig,
    training: TrainingConfig,
    form: SampleFormat,
    batch_size: BatchSize,
    dp_rank: int = 0,
) -> RunData:
    """The datasets of a run, large enough for all its steps and measurements."""
    sizes = (*num_samples(training, batch_size.global_batch_size), 0)
    train, valid, _ = build_gpt_datasets(data, form, sizes)
    assert train is not None
    return RunData(data, train, valid, batch_size, dp_rank)


def num_samples(training: TrainingConfig, global_batch_size: int) -> tuple[int, int]:
    """Samples of training and validation data that a run asks for, by Megatron-LM's count.

    The count decides how many epochs are shuffled together, so it decides the order as well."""
    if not training.eval_iters:
        return training.train_iters * global_batch_size, 0
    by_interval = training.train_iters // training.eval_interval + 1
    measurements = max(by_interval, len(training.evaluation_steps()))
    return (
        training.train_iters * global_batch_size,
        measurements * training.eval_iters * global_batch_size,
    )
