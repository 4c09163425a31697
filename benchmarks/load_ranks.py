"""A checkpoint loaded by several ranks at once, each its share, counting what they fetch for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from trainyard.artifacts import store
from trainyard.checkpoint.layout import LocalTensors, ShardedTensor
from trainyard.checkpoint.load import Checkpoint, open_checkpoint, restore
from trainyard.checkpoint.shared_load import LoadGroups
from trainyard.testing.distributed import run_distributed


@dataclass(frozen=True, slots=True)
class Fetched:
    """By all ranks together."""

    bytes: int
    """Documents included."""
    seconds: float
    """Of the slowest, from opening to the last value."""


def load_on_ranks(url: str, tp: int, dp: int) -> Fetched:
    """Matrices cut by rows on `tp` ranks, `dp` times; each in a process of its own, on gloo."""
    found = run_distributed(_load, tp * dp, "gloo", url, tp, timeout_seconds=600)
    return Fetched(sum(size for size, _ in found), max(seconds for _, seconds in found))


def _load(url: str, tp: int) -> tuple[int, float]:
    fetched: list[int] = []
    store.read_range = _counting(store.read_range, fetched)
    store.read_bytes = _counting(store.read_bytes, fetched)
    torch.set_num_threads(1)
    dist.barrier()
    began = time.perf_counter()
    with open_checkpoint(url) as checkpoint:
        targets = {name: _part(checkpoint, name, tp) for name in checkpoint.names()}
        assert dist.group.WORLD is not None
        restore(checkpoint, targets, "", share=LoadGroups(dist.group.WORLD))
    return sum(fetched), time.perf_counter() - began


def _part(checkpoint: Checkpoint, name: str, tp: int) -> LocalTensors:
    shape = checkpoint.spec(name).shape
    rows = shape[0] // tp
    offset = (dist.get_rank() % tp * rows, *(0 for _ in shape[1:]))
    return ShardedTensor(name, torch.empty(rows, *shape[1:]), shape, offset)


def _counting(read: Callable[..., bytes], fetched: list[int]) -> Callable[..., bytes]:
    @wraps(read)
    def counted(*args: Any) -> bytes:
        data = read(*args)
        fetched.append(len(data))
        return data

    return counted
