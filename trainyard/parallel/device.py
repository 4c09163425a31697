"""The device of a process, and the most memory it has held there."""

from __future__ import annotations

import resource
import sys

import torch

from trainyard.errors import ConfigError


def resolve_device(option: str, local_rank: int = 0) -> torch.device:
    """The device of this rank: `cpu`, `cuda`, or `auto` for CUDA where there is one."""
    available = torch.cuda.is_available()
    if option == "cpu" or (option == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError(
            "--device cuda: torch sees no CUDA device here; use --device cpu, or install a CUDA "
            "build of torch"
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--nproc-per-node needs a CUDA device for each rank, and there are "
            f"{torch.cuda.device_count()}; start fewer ranks, or use --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def peak_memory_bytes(device: torch.device) -> int:
    """Most that was allocated on a CUDA device so far; on the CPU, most that the process held."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    """What the maker calls it, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
