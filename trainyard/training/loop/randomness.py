"""What dropout draws, as a function of where in the run it is drawn.

The generators are seeded anew for every micro-batch, from the run's seed, the step, and the place
of the micro-batch in the global batch (seeds.py); dropout on the residual stream hashes the same
seed (parallel/random.py). So there is no state of a generator to save: a resumed run
draws what an undisturbed one would, and so does one that cuts the same batch over another number of
ranks."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from trainyard.datasets.loader import Batch
from trainyard.errors import ConfigError

HOST_SEED = "seed"
"""Key of a training batch: () int64 on the CPU, the seed of the micro-batch."""


def seed_generators(batch: Batch, tp_rank: int, cp_rank: int, chunk: int) -> None:
    """Seed the generators of the CPU and of this rank's CUDA device for one chunk of a micro-batch
    that carries the seed of its dropout.

    Ranks that share heads or sequence draw apart from each other, as they drop other things."""
    value = generator_seed(int(batch[HOST_SEED]), tp_rank, cp_rank, chunk)
    torch.default_generator.manual_seed(value)  # torch.manual_seed asks every kind of device: 2 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def generator_seed(seed: int, tp_rank: int, cp_rank: int, chunk: int) -> int:
    """What a rank seeds its generators with for one chunk of the micro-batch of this seed."""
    return (seed + 1_000_003 * tp_rank + 7_919 * cp_rank + 104_729 * chunk) % 2**63


def held_seeds() -> tuple[int, ...]:
    """What the generators of the CPU and of this rank's CUDA device were last seeded with, by their
    own account. The host knows both: nothing waits for the device."""
    held = (torch.default_generator.initial_seed(),)
    return (*held, torch.cuda.initial_seed()) if torch.cuda.is_initialized() else held


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
