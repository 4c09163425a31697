"""Reports the timers of every rank, and slow ranks, at each interval."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import ProcessGroup

from trainyard.parallel.groups import gather_objects
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.timers import COMPUTE, Timers, timer_lines

log = logging.getLogger(__name__)

LATE = 1.1
"""A rank is slow if its compute time exceeds the median by this factor."""


def _print(line: str) -> None:
    print(line, flush=True)


class TimerReport(Callback):
    """On every rank; rank 0 prints."""

    def __init__(
        self,
        timers: Timers,
        world: ProcessGroup | None,
        rank: int,
        interval: int,
        *,
        option: str = "minmax",
        show_timers: bool = True,
        num_stragglers: int = 0,
        gauges: dict[str, float] | None = None,
        write: Callable[[str], None] = _print,
    ) -> None:
        """option: --timing-log-option. num_stragglers: number of slowest and fastest ranks to show;
        0: no straggler report. gauges: for loggers, filled with the times of rank 0."""
        self._timers = timers
        self._world = world
        self._rank = rank
        self._interval = interval
        self._option = option
        self._show_timers = show_timers
        self._num_stragglers = num_stragglers
        self._gauges = {} if gauges is None else gauges
        self._tags: list[str] = []
        self._write = write
        self._num_steps = 0
        self.last: list[dict[str, float]] = []
        """Times (ms per step) of each rank in the last interval."""

    def after_step(self, event: StepEvent) -> None:
        """Gather the times of all ranks, and print them."""
        for tag in self._tags:
            self._gauges.pop(tag, None)
        if event.timing is None:
            return
        self._num_steps += 1
        if event.record.step % self._interval and not event.is_last:
            return
        own = {name: ms / self._num_steps for name, ms in self._timers.take().items()}
        self._num_steps = 0
        self.last = gather_objects(own, self._world)
        figures = {f"{name}-time": ms / 1000.0 for name, ms in own.items()}
        self._gauges.update(figures)
        self._tags = list(figures)
        if self._rank != 0:
            return
        if self._show_timers:
            for line in timer_lines(self.last, self._option):
                self._write(line)
        if self._num_stragglers:
            for line in straggler_lines(self.last, self._num_stragglers):
                self._write(line)


def straggler_lines(ranks: Sequence[Mapping[str, float]], count: int) -> list[str]:
    """The fastest and the slowest ranks by compute time, ms per step.

    Ranks of a tensor- or context-parallel group wait for each other in it, so all show the time of
    the slowest one. Pipeline stages may have different work."""
    computing = {
        rank: sum(times[name] for name in COMPUTE if name in times)
        for rank, times in enumerate(ranks)
        if any(name in times for name in COMPUTE)
    }
    if not computing:
        return []
    order = sorted(computing, key=lambda rank: (computing[rank], rank))
    middle = statistics.median(computing.values())
    lines = [
        f" straggler report | compute per step (ms) | min: {_named(order[:count], computing)} | "
        f"median: {middle:.1f} | max: {_named(order[::-1][:count], computing)} |"
    ]
    late = [rank for rank in order[::-1] if computing[rank] > LATE * middle]
    if late:
        slowest = 100.0 * (computing[late[0]] / middle - 1.0)
        names = ", ".join(str(rank) for rank in late[:8])
        lines.append(f" slow ranks: {names}; the slowest computes {slowest:.0f} % longer than most")
    return lines


def _named(ranks: Sequence[int], times: Mapping[int, float]) -> str:
    return ", ".join(f"{times[rank]:.1f} (rank {rank})" for rank in ranks)
