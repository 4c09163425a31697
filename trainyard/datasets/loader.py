"""Samples as batches of torch tensors; the one module of this room that imports torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import Dataset, Sample
from trainyard.datasets.sampler import SamplerShape, cyclic, single

Batch = dict[str, Tensor]


def torch_permutation(epoch: int, n: int) -> NDArray[np.int64]:
    """torch.randperm seeded by the epoch alone, as Megatron-LM's cyclic sampler."""
    generator = torch.Generator()
    generator.manual_seed(epoch)
    order: NDArray[np.int64] = torch.randperm(n, generator=generator).numpy()
    return order


def sample_groups(
    data: DataConfig, shape: SamplerShape, consumed: int
) -> Iterator[NDArray[np.int64]]:
    """(dp, micro batch size) sample indices from `consumed` on, by --dataloader-type."""
    if data.dataloader_type == "cyclic":
        return cyclic(shape, consumed, torch_permutation, data.data_sharding)
    return single(shape, consumed)


@dataclass(frozen=True, slots=True)
class _RankBatches:
    """The sample indices of one rank, as torch's loader wants them."""

    data: DataConfig
    shape: SamplerShape
    consumed: int
    dp_rank: int

    def __iter__(self) -> Iterator[list[int]]:
        for group in sample_groups(self.data, self.shape, self.consumed):
            yield group[self.dp_rank].tolist()


def collate(samples: list[Sample]) -> Batch:
    """Stack samples: (b, s) each."""
    return {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}


def _leave_signals_to_the_trainer(worker: int) -> None:
    """A signal to the whole process group must not end a worker while the trainer still saves.

    Workers end when the loader does, or when they find their parent gone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def build_loader(
    dataset: Dataset, data: DataConfig, shape: SamplerShape, consumed: int, dp_rank: int
) -> Iterator[Batch]:
    """Micro-batches of one rank, from the sample after `consumed` on."""
    loader: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]  # torch asks for its own base class, but needs two methods
        batch_sampler=_RankBatches(data, shape, consumed, dp_rank),
        num_workers=data.num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    return iter(loader)
