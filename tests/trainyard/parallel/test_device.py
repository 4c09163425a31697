"""Which device a process gets, and the memory it is said to take."""

from __future__ import annotations

import resource

import pytest
import torch

from trainyard.errors import ConfigError
from trainyard.parallel.device import peak_memory_bytes, resolve_device


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """torch as it is with so many GPUs; the list fills with the devices that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_each_rank_gets_its_own_gpu_and_makes_it_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend_gpus(monkeypatch, 2)
    assert [resolve_device("auto", rank) for rank in (0, 1)] == current
    assert resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cpu", 1) == torch.device("cpu")
    assert [device.index for device in current] == [0, 1, 0]


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch, 0)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device here"):
        resolve_device("cuda")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"--nproc-per-node .* there are 2"):
        resolve_device("auto", 2)


def test_memory_on_the_cpu_is_what_the_process_held_at_most() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after = peak_memory_bytes(torch.device("cpu"))
    assert held.numel() <= after
    assert before <= after
    assert after >= resource.getpagesize()
