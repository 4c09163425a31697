"""Loads samples as batches of torch tensors. The only module of `datasets` that imports torch."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import Dataset, Sample
from trainyard.datasets.sampler import SamplerShape, cyclic, single
from trainyard.errors import ConfigError, TrainyardError

Batch = dict[str, Tensor]

SAMPLE_IDS = "trainyard.sample_ids"
"""Key of the sample ids of a batch: (b, 2) int64 from `Dataset.ids`, on the host, not for the
model."""


@runtime_checkable
class ExternalData(Protocol):
    """A dataset that loads itself, for --dataloader-type external.

    A program that calls the library passes one instead of a dataset. It decides which samples a
    rank gets, in what order, and where a resumed run continues. The ledger cannot record its
    samples."""

    def __len__(self) -> int:
        """Samples."""

    def batches(self, shape: SamplerShape, consumed: int, dp_rank: int) -> Iterator[Batch]:
        """Micro-batches of one rank after `consumed` samples of all ranks: tokens, labels,
        position_ids (b, s) int64 and loss_mask (b, s) float32, at least."""


def torch_permutation(epoch: int, n: int) -> NDArray[np.int64]:
    """torch.randperm seeded by the epoch alone, as Megatron-LM's cyclic sampler."""
    generator = torch.Generator()
    generator.manual_seed(epoch)
    order: NDArray[np.int64] = torch.randperm(n, generator=generator).numpy()
    return order


def sample_blocks(
    data: DataConfig, shape: SamplerShape, consumed: int
) -> Iterator[NDArray[np.int64]]:
    """(n, dp, micro batch size) sample indices from `consumed` on, by --dataloader-type."""
    _refuse_external(data)
    if data.dataloader_type == "cyclic":
        _check_begin(shape, consumed)
        return cyclic(shape, consumed, torch_permutation, data.data_sharding)
    return single(shape, consumed)


def _check_begin(shape: SamplerShape, consumed: int) -> None:
    """As in Megatron-LM, a shuffled epoch goes on with a whole micro-batch of every rank."""
    per_epoch = shape.num_samples // shape.per_step * shape.per_step
    done = consumed % per_epoch
    if done % shape.per_step:
        raise ConfigError(
            f"--dataloader-type cyclic: {done} samples of the epoch are consumed, which is no "
            f"multiple of --micro-batch-size {shape.micro_batch_size} x {shape.dp} data-parallel "
            "ranks; continue with a micro-batch size and ranks whose product divides it"
        )


def _refuse_external(data: DataConfig) -> None:
    if data.dataloader_type == "external":
        raise ConfigError(
            "--dataloader-type external needs a loader from the program that calls the library; "
            "choose single or cyclic for token files"
        )


@dataclass(frozen=True, slots=True)
class _RankBatches:
    """The sample indices of one rank, as a batch sampler for torch's loader."""

    data: DataConfig
    shape: SamplerShape
    consumed: int
    dp_rank: int

    def __iter__(self) -> Iterator[list[int]]:
        for block in sample_blocks(self.data, self.shape, self.consumed):
            for indices in block[:, self.dp_rank]:
                yield indices.tolist()


@runtime_checkable
class _Prefetching(Protocol):
    """A dataset that prefetches announced samples, see `sample_format.Dataset`."""

    def prefetch(self, indices: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class _BatchPrefetch:
    """Announces a whole batch to its dataset before it reads the first sample.

    Remote pieces are then fetched in parallel, in the process that loads the batch."""

    dataset: Any

    def __getitems__(self, indices: list[int]) -> Any:
        self.dataset.prefetch(indices)
        return _samples(self.dataset, indices)


class _Named(NamedTuple):
    """Samples, or their batch, with their ids. The ids are an array, because a tensor from a worker
    process needs a separate file."""

    samples: Any
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Naming:
    """Adds the sample ids to each batch, by the numbers requested, in the process that loads it."""

    dataset: Any
    source: Dataset

    def __getitems__(self, indices: list[int]) -> _Named:
        samples = _samples(self.dataset, indices)
        ids = self.source.ids(np.array(indices, np.int64))
        return _Named(samples, np.array(ids, np.int64, order="C"))


@dataclass(frozen=True, slots=True)
class _FaultsHandedOver:
    """A dataset in a worker process. Returns an error in the data instead of the batch, because
    torch would turn its message into a traceback."""

    dataset: Any

    def __getitems__(self, indices: list[int]) -> Any:
        try:
            return _samples(self.dataset, indices)
        except TrainyardError as error:
            return error


def _samples(dataset: Any, indices: list[int]) -> Any:
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


class _Loaded(Iterator[Batch]):
    """The batches of torch's loader; raises the first error that a worker process returned."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if isinstance(batch, TrainyardError):
            self.end()
            raise batch
        if isinstance(batch, _Named):
            return {**batch.samples, SAMPLE_IDS: torch.from_numpy(batch.ids)}
        found: Batch = batch
        return found

    def end(self) -> None:
        """End the worker processes."""
        self._batches = iter(())


def _announced(dataset: _Prefetching, batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """The batches, each announced to the dataset one batch early.

    For a loader without worker processes, which loads nothing during a step."""
    waiting: list[int] | None = None
    for batch in batches:
        dataset.prefetch(batch)
        if waiting is not None:
            yield waiting
        waiting = batch
    if waiting is not None:
        yield waiting


def _collate_or_fault(
    samples: list[Sample] | Sample | _Named | TrainyardError,
) -> Batch | _Named | TrainyardError:
    if isinstance(samples, TrainyardError):
        return samples
    if isinstance(samples, _Named):
        return _Named(collate(samples.samples), samples.ids)
    return collate(samples)


def collate(samples: list[Sample] | Sample) -> Batch:
    """Stack samples to (b, s) each. A dataset that serves whole batches has stacked them
    already."""
    if isinstance(samples, dict):
        # Arrays that are the same for every sample are shared, and must not be written to.
        owned = {k: v if v.flags.writeable else v.copy() for k, v in samples.items()}
        return {key: torch.from_numpy(values) for key, values in owned.items()}
    return {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ignore signals in a worker: one to the whole process group must not end it while the trainer
    still saves.

    Workers end with the loader, or when their parent has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def build_loader(
    dataset: Dataset | ExternalData,
    data: DataConfig,
    shape: SamplerShape,
    consumed: int,
    dp_rank: int,
    *,
    named: bool = False,
) -> Iterator[Batch]:
    """Micro-batches of one rank, from the sample after `consumed` on.

    named: each has its `SAMPLE_IDS`, unless the data loads itself."""
    if isinstance(dataset, ExternalData):
        return dataset.batches(shape, consumed, dp_rank)
    _refuse_external(data)
    return load(dataset, data, _RankBatches(data, shape, consumed, dp_rank), named=named)


def end_loading(batches: Iterator[Batch]) -> None:
    """End the worker processes of a loader's batches, if any.

    The frames of an error keep the loader alive, but its workers must end."""
    if isinstance(batches, _Loaded):
        batches.end()


def load(
    dataset: Dataset, data: DataConfig, batches: Iterable[list[int]], *, named: bool = False
) -> Iterator[Batch]:
    """The batches of these sample indices, loaded ahead by --num-workers processes.

    named: with `SAMPLE_IDS`."""
    served: Any = dataset  # torch asks for its own base class, but needs two methods
    if isinstance(dataset, _Prefetching):
        served = _BatchPrefetch(dataset)
        batches = batches if data.num_workers else _announced(dataset, batches)
    if named:
        served = _Naming(served, dataset)
    if data.num_workers:
        served = _FaultsHandedOver(served)
    loader: DataLoader[Any] = DataLoader(
        served,
        batch_sampler=batches,
        num_workers=data.num_workers,
        collate_fn=_collate_or_fault,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    return _Loaded(iter(loader))
