"""Timers of the parts of a step, under Megatron-LM's names.

Level 1 times the parts of a step, level 2 also parts that run many times in it. On CUDA two events
of the stream time a part, so the host never waits; a report reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

LEVELS = {
    "forward-backward": 1,
    "all-grads-sync": 1,
    "optimizer": 1,
    "forward-compute": 2,
    "backward-compute": 2,
    "batch-generator": 2,
    "layernorm-grads-all-reduce": 2,
    "embedding-grads-all-reduce": 2,
    "optimizer-clip-main-grad": 2,
    "optimizer-inner-step": 2,
}
"""The parts, and the --timing-log-level from which they are timed."""

COMPUTE = ("forward-compute", "backward-compute")
"""Parts without communication: ranks with the same work should take the same time for them."""

MAX_PENDING = 4096
"""Limit of unread pairs of CUDA events per part."""

_NOTHING = nullcontext()


def _nothing() -> None:
    pass


class Timers:
    """`timers(name)` is a context manager around a part."""

    def __init__(
        self,
        level: int = 0,
        device: torch.device | None = None,
        *,
        always: Sequence[str] = (),
        barrier: Callable[[], None] = _nothing,
    ) -> None:
        """always: parts to time at any level. barrier: called before parts of level 1 if the level
        asks for them."""
        on_cuda = device is not None and device.type == "cuda"
        self._parts: dict[str, _CudaTimer | _HostTimer] = {}
        for name, needed in LEVELS.items():
            if needed <= level or name in always:
                before = barrier if needed == 1 and level >= 1 else _nothing
                self._parts[name] = _CudaTimer(before) if on_cuda else _HostTimer(before)

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """Time a part; free if the part is not timed."""
        assert name in LEVELS, name
        return self._parts.get(name, _NOTHING)

    @property
    def is_on(self) -> bool:
        """Whether anything is timed."""
        return bool(self._parts)

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since the last call, without parts that did not run."""
        taken = {name: timer.take() for name, timer in self._parts.items()}
        return {name: ms for name, ms in taken.items() if ms is not None}


class _HostTimer:
    """On the CPU, where calls are synchronous."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._ms = 0.0
        self._count = 0
        self._began = 0.0

    def __enter__(self) -> None:
        self._before()
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._ms += 1000.0 * (time.perf_counter() - self._began)
        self._count += 1

    def take(self) -> float | None:
        ms, count = self._ms, self._count
        self._ms, self._count = 0.0, 0
        return ms if count else None


class _CudaTimer:
    """On a CUDA stream."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._ms = 0.0
        self._count = 0
        self._pending: list[tuple[Any, Any]] = []
        self._start: Any = None

    def __enter__(self) -> None:
        self._before()
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def __exit__(self, *error: object) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pending.append((self._start, end))
        self._count += 1
        if len(self._pending) >= MAX_PENDING:
            self._read()

    def _read(self) -> None:
        for start, end in self._pending:
            end.synchronize()
            self._ms += start.elapsed_time(end)
        self._pending.clear()

    def take(self) -> float | None:
        self._read()
        ms, count = self._ms, self._count
        self._ms, self._count = 0.0, 0
        return ms if count else None


# --- reports --------------------------------------------------------------------------------------


def timer_lines(ranks: Sequence[Mapping[str, float]], option: str) -> list[str]:
    """Megatron-LM's report of the times (ms) of each rank: --timing-log-option max, minmax, all."""
    names = [name for name in LEVELS if any(name in times for times in ranks)]
    if not names:
        return []
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name in names:
            lines.append(f"  {name}:")
            lines += [
                f"     rank {rank:2d}: {times[name]:.2f}"
                for rank, times in enumerate(ranks)
                if name in times
            ]
        return lines
    shown = {name: [times[name] for times in ranks if name in times] for name in names}
    if option == "max":
        head = "max time across ranks (ms):"
        values = {name: f"{max(found):.2f}" for name, found in shown.items()}
    else:
        head = "(min, max) time across ranks (ms):"
        values = {name: f"({min(found):.2f}, {max(found):.2f})" for name, found in shown.items()}
    return [head, *(f"    {(name + ' ').ljust(48, '.')}: {values[name]}" for name in names)]
