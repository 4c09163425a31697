"""performance.json: speed, times and memory of a run (--save-performance-summary).

The figures are of this process: of a resumed run, the last attempt. A stopped or failed run writes
one too, and says so under `ended`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.throughput import PEAK_CONVENTION, StepTiming, StepTimings, peak_tflops

FILE = "performance.json"
FORMAT_VERSION = 1
PERCENTILES = (5, 25, 50, 75, 95, 99)
FINISHED = "finished"
WARM_UP = 1
"""First steps, which compile and fill caches; excluded if there are others."""


def performance_document(
    timings: Sequence[StepTiming],
    info: RunInfo,
    *,
    peaks: Sequence[int],
    planned_bytes: float | None = None,
    timers: Sequence[Mapping[str, float]] = (),
    ended: str = FINISHED,
    of_rank: int | None = None,
) -> dict[str, Any]:
    """The document. peaks: peak memory of each rank. timers: times (ms per step) of each rank in
    the last interval. ended: reason for the end, `FINISHED` for a finished run. of_rank: the only
    rank in peaks and timers, if the others could not be reached."""
    steady = timings[WARM_UP:] or timings
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "finished": ended == FINISHED,
        "ended": ended,
        "last_step": timings[-1].step if timings else None,
        "steps": info.steps,
        "device": info.device_name,
        "ranks": info.world_size,
        "steps_measured": len(steady),
        "conventions": {
            "flops": f"{info.flops.name}: {info.flops.meaning}",
            "mfu": PEAK_CONVENTION,
            "peak_tflops": peak_tflops(info.device_name),
        },
    }
    if steady:
        document.update(_speed(steady, info))
    document["memory_bytes"] = {
        "peak": max(peaks, default=0),
        "peak_of_ranks": list(peaks),
        "planned": planned_bytes,
    }
    if of_rank is not None:
        document["memory_bytes"]["of_rank"] = of_rank
    if timers:
        document["timers_ms"] = _timers(timers)
    return document


def _speed(steady: Sequence[StepTiming], info: RunInfo) -> dict[str, Any]:
    ms = [timing.ms for timing in steady]
    total = sum(ms)
    # Over the whole time: a mean of rates would hide slow steps.
    tokens = sum(t.tokens_per_second * t.ms for t in steady) / total / info.world_size
    tflops = sum(t.tflops_per_gpu * t.ms for t in steady) / total
    mfu = info.mfu(tflops)
    return {
        "tokens_per_second_per_gpu": round(tokens, 2),
        "tflops_per_gpu": round(tflops, 5),
        "mfu": None if mfu is None else round(mfu, 5),
        "step_ms": {
            "mean": round(statistics.fmean(ms), 3),
            **{f"p{share}": round(percentile(ms, share), 3) for share in PERCENTILES},
            "max": round(max(ms), 3),
        },
        "data_wait_share": round(sum(t.data_wait_ms for t in steady) / total, 5),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile with linear interpolation."""
    order = sorted(values)
    place = (len(order) - 1) * share / 100.0
    below = int(place)
    above = min(below + 1, len(order) - 1)
    return order[below] + (order[above] - order[below]) * (place - below)


def _timers(ranks: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(name for times in ranks for name in times)
    found = {name: [times[name] for times in ranks if name in times] for name in names}
    return {
        name: {"min": round(min(values), 3), "max": round(max(values), 3)}
        for name, values in found.items()
    }


class Timings(Callback):
    """Collects the timing of every step; `keep(step, lines)` gets the new ones at every save."""

    def __init__(self, interval: int, keep: Callable[[int, list[str]], None]) -> None:
        self.timings = StepTimings()
        self._interval = interval
        self._keep = keep
        self._num_kept = 0

    def after_step(self, event: StepEvent) -> None:
        """Record the timing of the step."""
        if event.timing is None:
            return
        self.timings.append(event.timing)
        if event.is_last or event.is_stopping or event.record.step % self._interval == 0:
            new = self.timings[self._num_kept :]
            self._keep(event.record.step, [timing.line() for timing in new])
            self._num_kept = len(self.timings)
