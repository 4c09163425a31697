"""Prepares a process for training: device, threads, seeds, process groups, CUDA variables."""

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
from trainyard.parallel.dims import dims_of, expert_dims_of
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
    """The groups and the device of this rank, within the context. Uses an existing default group,
    and leaves it initialised."""
    _, _, local_rank, local_ranks = rank_of_environment()
    # Before the first CUDA call: CUDA reads its variables once.
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
    experts = expert_dims_of(config.parallel, dims)
    yield build_groups(dims, dist.get_rank(), timeout, experts, config.parallel.num_instances)


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
    """Seed the generators that a model may use outside of its forward pass."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


REPRODUCIBLE = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""Values of NCCL_ALGO with a fixed order of additions: without NVLink SHARP."""


def use_deterministic_algorithms() -> None:
    """Make torch refuse CUDA operations, and NCCL algorithms, whose results differ between runs.

    Raises ConfigError for another NCCL_ALGO."""
    algorithm = os.environ.setdefault("NCCL_ALGO", "^NVLS")
    if algorithm not in REPRODUCIBLE:
        raise ConfigError(
            f"--deterministic-mode with NCCL_ALGO={algorithm}: sums may differ from run to run; "
            f"set it to one of {', '.join(REPRODUCIBLE)}, or leave it unset for ^NVLS"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    # Filling uninitialised memory would only hide bugs, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


# --- CUDA_DEVICE_MAX_CONNECTIONS

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True, slots=True)
class Connections:
    """The message about the variable."""

    message: str
    is_warning: bool = False


def hidden_communication(parallel: ParallelConfig) -> str | None:
    """The option that overlaps communication with matrix products; None without one."""
    if parallel.tensor_model_parallel_size > 1:
        return f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size}"
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p":
        return f"--context-parallel-size {parallel.context_parallel_size} --cp-comm-type p2p"
    return None


def _connections_of_shards(parallel: ParallelConfig, found: str | None) -> Connections | None:
    """Weights are gathered while layers compute, which takes several queues."""
    if found is None or found.strip() != "1":
        return None
    return Connections(
        f"{VARIABLE}=1, from the environment: gathering weights waits for the computation that "
        f"should hide it ({parallel.data_parallel.asked_by}); unset it",
        is_warning=True,
    )


def arrange_connections(
    parallel: ParallelConfig, environ: MutableMapping[str, str], *, cuda_started: bool
) -> Connections | None:
    """Set the variable if it helps and is unset; returns a message about it.

    The number of hardware queues of a process. Tensor parallelism, and context parallelism in a
    ring, start a collective and then the matrix product that hides it. One queue keeps this order.
    With several, the product may fill the device first, and the collective runs after it: the same
    result, but slower. Megatron-LM demands 1; trainyard sets it, unless it is set already. Fully
    sharded weights are gathered under computation that started before, and need several.

    cuda_started: CUDA has read its variables in this process, so setting one is too late."""
    option, found = hidden_communication(parallel), environ.get(VARIABLE)
    if parallel.data_parallel.fully_shards:
        return _connections_of_shards(parallel, found)
    if option is None:
        return None
    if found is None and cuda_started:
        return Connections(
            f"{VARIABLE} is not set, and CUDA is already running: communication may run after the "
            f"products that should hide it ({option}); set it to 1 when you start the program",
            is_warning=True,
        )
    if found is None:
        environ[VARIABLE] = "1"
        return Connections(
            f"{VARIABLE}=1, set by trainyard: communication starts before the products that hide "
            f"it ({option})"
        )
    if found.strip() == "1":
        return Connections(f"{VARIABLE}=1, from the environment ({option})")
    return Connections(
        f"{VARIABLE}={found}, from the environment: communication may run after the products that "
        f"should hide it ({option}); before Blackwell, 1 or unset is faster",
        is_warning=True,
    )
