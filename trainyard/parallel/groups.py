"""The process groups of a run, made once and passed to whoever communicates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.errors import ConfigError, InfrastructureError
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims, dims_of


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Where this rank stands, and whom it talks to."""

    dims: ParallelDims
    rank: int
    dp: ProcessGroup | None = None
    """Ranks that hold the same weights; None for one rank alone, which needs no communication."""

    @property
    def dp_rank(self) -> int:
        """This rank's place in the data-parallel group."""
        return self.dims.dp_rank(self.rank)


ALONE = ProcessGroups(ParallelDims(), 0)
"""One process: a notebook, a test, a small run."""


def rank_of_environment() -> tuple[int, int, int, int]:
    """(rank, ranks, local rank, local ranks) that a launcher set, or one process alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world, local_rank, local_world = (os.environ.get(name) for name in names)
    return (
        int(rank or 0),
        int(world or 1),
        int(local_rank or rank or 0),
        int(local_world or world or 1),
    )


T = TypeVar("T")


def broadcast_object(value: T, group: ProcessGroup | None) -> T:
    """What the first rank of the group passes, on all of them."""
    if group is None:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group_src=0, group=group)
    received: T = box[0]
    return received


@contextmanager
def process_groups(config: ParallelConfig, device: torch.device) -> Iterator[ProcessGroups]:
    """The groups of the ranks that the launcher started, until the end of the context."""
    rank, world_size, _, _ = rank_of_environment()
    dims = dims_of(config, world_size)
    if world_size == 1:
        yield ProcessGroups(dims, rank)
        return
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("--distributed-backend nccl needs CUDA devices; use gloo")
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise InfrastructureError(
            f"rank {rank} of {world_size} could not join the others over {backend} at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {error}"
        ) from error
    try:
        yield ProcessGroups(dims, rank, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
