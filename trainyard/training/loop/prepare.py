"""A process made ready to train: its device, threads, seeds, and the ranks it works with."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from trainyard.parallel.comm_errors import communication_errors
from trainyard.parallel.device import resolve_device
from trainyard.parallel.dims import dims_of
from trainyard.parallel.groups import (
    ProcessGroups,
    build_groups,
    process_groups,
    rank_of_environment,
)
from trainyard.training.loop.cuda_connections import Connections, arrange_connections
from trainyard.training.loop.randomness import seed_process, use_deterministic_algorithms
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.options.training import TrainingConfig

log = logging.getLogger(__name__)


@contextmanager
def prepared(config: PretrainConfig) -> Iterator[tuple[ProcessGroups, torch.device]]:
    """The groups and the device of this rank, until the end of the context. A default group that
    is there already is used and left."""
    _, _, local_rank, local_ranks = rank_of_environment()
    # Before CUDA is asked for anything: it reads its variables once.
    connections = _arrange_connections(config)
    device = resolve_device(config.training.device, local_rank)
    _prepare_torch(config.training, local_ranks)
    with (
        _groups(config, device) as groups,
        communication_errors(groups.rank, groups.dims.world_size),
    ):
        if connections is not None and device.type == "cuda" and groups.rank == 0:
            level = logging.WARNING if connections.is_warning else logging.INFO
            log.log(level, "%s", connections.message)
        yield groups, device


def _arrange_connections(config: PretrainConfig) -> Connections | None:
    if config.training.device == "cpu" or torch.version.cuda is None:
        return None
    started = torch.cuda.is_initialized()
    return arrange_connections(config.parallel, os.environ, cuda_started=started)


@contextmanager
def _groups(config: PretrainConfig, device: torch.device) -> Iterator[ProcessGroups]:
    if not dist.is_initialized():
        with process_groups(config.parallel, device) as groups:
            yield groups
        return
    dims = dims_of(config.parallel, dist.get_world_size())
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    yield build_groups(dims, dist.get_rank(), timeout)


def _prepare_torch(training: TrainingConfig, local_ranks: int) -> None:
    threads = training.num_threads
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
    if threads is not None:
        torch.set_num_threads(threads)
    seed_process(training.seed)
    if training.deterministic_mode:
        use_deterministic_algorithms()
