"""A process made ready to train: its device, threads, seeds, and the ranks it works with."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from trainyard.errors import ConfigError
from trainyard.parallel.comm_errors import communication_errors
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.device import resolve_device
from trainyard.parallel.dims import dims_of
from trainyard.parallel.groups import (
    ProcessGroups,
    build_groups,
    process_groups,
    rank_of_environment,
)
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


def seed_process(seed: int) -> None:
    """Seed what a model may draw from outside its forward pass."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


REPRODUCIBLE = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""Values of NCCL_ALGO with which NCCL adds in one order: without NVLink's own sums."""


def use_deterministic_algorithms() -> None:
    """Let torch refuse operations on CUDA whose bits change from run to run, and NCCL sums that do.

    Raises ConfigError for an NCCL_ALGO that allows others."""
    algorithm = os.environ.setdefault("NCCL_ALGO", "^NVLS")
    if algorithm not in REPRODUCIBLE:
        raise ConfigError(
            f"--deterministic-mode with NCCL_ALGO={algorithm}: sums may differ from run to run; "
            f"set it to one of {', '.join(REPRODUCIBLE)}, or leave it unset for ^NVLS"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    # Filling fresh memory would only hide bugs, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


# --- CUDA_DEVICE_MAX_CONNECTIONS

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True, slots=True)
class Connections:
    """What was found and done."""

    message: str
    is_warning: bool = False


def hidden_communication(parallel: ParallelConfig) -> str | None:
    """The option that asks for communication behind matrix products; None if none does."""
    if parallel.tensor_model_parallel_size > 1:
        return f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size}"
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p":
        return f"--context-parallel-size {parallel.context_parallel_size} --cp-comm-type p2p"
    return None


def arrange_connections(
    parallel: ParallelConfig, environ: MutableMapping[str, str], *, cuda_started: bool
) -> Connections | None:
    """Set the variable where it helps and nobody has; what there is to say of it.

    cuda_started: CUDA has read its variables in this process, so that setting one is too late."""
    option, found = hidden_communication(parallel), environ.get(VARIABLE)
    if option is None:
        return None
    if found is None and cuda_started:
        return Connections(
            f"{VARIABLE} is not set, and CUDA was started before: communication may come behind "
            f"the products that should hide it ({option}); set it to 1 when the program is started",
            is_warning=True,
        )
    if found is None:
        environ[VARIABLE] = "1"
        return Connections(
            f"{VARIABLE}=1, set here: communication begins before the products that hide it "
            f"({option})"
        )
    if found.strip() == "1":
        return Connections(f"{VARIABLE}=1, as it was given ({option})")
    return Connections(
        f"{VARIABLE}={found}, as it was given: communication may come behind the products that "
        f"should hide it ({option}); before Blackwell, 1 or nothing is faster",
        is_warning=True,
    )
