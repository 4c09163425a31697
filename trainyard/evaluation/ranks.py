"""The ranks of an evaluation: started by a stage, a launcher, or the program that calls it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from trainyard.inference.config import LayoutConfig
from trainyard.parallel.comm_errors import communication_errors
from trainyard.parallel.device import resolve_device
from trainyard.parallel.dims import dims_of
from trainyard.parallel.groups import (
    ProcessGroups,
    build_groups,
    process_groups,
    rank_of_environment,
)


@contextmanager
def evaluation_ranks(
    layout: LayoutConfig, device: str
) -> Iterator[tuple[ProcessGroups, torch.device]]:
    """The groups and the device of this rank, within the context. Uses an existing default group,
    and leaves it initialised."""
    rank, world_size, local_rank, local_ranks = rank_of_environment()
    where = resolve_device(device, local_rank)
    if local_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    parallel = layout.parallel()
    with communication_errors(rank, world_size):
        if not dist.is_initialized():
            with process_groups(parallel, where) as groups:
                yield groups, where
            return
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        dims = dims_of(parallel, dist.get_world_size())
        yield build_groups(dims, dist.get_rank(), timeout), where
