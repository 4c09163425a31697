"""What dropout draws, as a function of where in the run it is drawn.

The generators are seeded anew for every micro-batch, from the run's seed, the step, and the place
of the micro-batch in the global batch. So there is no state of a generator to save: a resumed run
draws what an undisturbed one would, and so does one that cuts the same batch over another number of
ranks."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of one micro-batch; `microbatch` counts over the global batch of all ranks."""
    text = f"trainyard:{seed}:{step}:{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & (2**63 - 1)


def seed_microbatch(seed: int, step: int, microbatch: int) -> None:
    """Seed the generators of the CPU and of this rank's CUDA device for one micro-batch."""
    value = microbatch_seed(seed, step, microbatch)
    torch.default_generator.manual_seed(value)  # torch.manual_seed asks every kind of device: 2 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def seed_process(seed: int) -> None:
    """Seed what a model may draw from outside its forward pass."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic_algorithms() -> None:
    """Let torch refuse operations on CUDA whose bits change from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    # Filling fresh memory would only hide bugs, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
