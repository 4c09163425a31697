"""The device of a process and its memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainyard.errors import ConfigError
from trainyard.machine import memory_bytes

GIBIBYTE = 2**30


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
    """Peak memory allocated on a CUDA device; on the CPU, peak memory of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_memory(what: str, needed: float, device: torch.device, advice: str) -> None:
    """Raise ConfigError for more than the whole memory of a device, or of this machine for the CPU.

    what: begins the message, as in "the weights of 7 parameters take"."""
    is_cuda = device.type == "cuda"
    found = torch.cuda.get_device_properties(device).total_memory if is_cuda else memory_bytes()
    if needed > found:
        where = f"device {device}" if is_cuda else "this machine"
        raise ConfigError(
            f"{what} {needed / GIBIBYTE:,.1f} GiB, and {where} has {found / GIBIBYTE:,.1f} GiB of "
            f"memory; {advice}"
        )


def device_name(device: torch.device) -> str:
    """The product name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Floating-point tensors made in this context have this type, unless they name another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
