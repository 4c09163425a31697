"""How fast a run is, and how much memory it takes. Never part of what a run makes."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass

import torch

from trainyard.parallel.device import peak_memory_bytes

FILE = "timings.jsonl"


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step of a run, in time."""

    step: int
    ms: float
    """Wall time of the step, loading of data included, evaluation and checkpoints not."""
    tokens_per_second: float
    """Over all ranks."""
    tflops_per_gpu: float
    """10^12 operations a second and device, by the convention of `trainyard.models.gpt.flops`."""
    data_wait_ms: float
    """Part of `ms` in which the loader was waited for."""
    memory_bytes: int
    """Peak so far of the first rank: allocated on its CUDA device, else resident in the process."""

    def line(self) -> str:
        """The JSON line of `timings.jsonl`."""
        return json.dumps({name: _rounded(value) for name, value in asdict(self).items()})


def _rounded(value: float) -> float:
    return round(value, 3) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Workload:
    """What a sample amounts to."""

    tokens_per_sample: int
    flops_per_sample: float
    world_size: int

    def timing(
        self,
        step: int,
        seconds: float,
        device: torch.device,
        num_samples: int,
        data_wait_seconds: float = 0.0,
    ) -> StepTiming:
        """The figures of a step of so many samples that took `seconds`."""
        return StepTiming(
            step,
            1000.0 * seconds,
            num_samples * self.tokens_per_sample / seconds,
            num_samples * self.flops_per_sample / (seconds * 1e12 * self.world_size),
            1000.0 * data_wait_seconds,
            peak_memory_bytes(device),
        )


def summary(timings: list[StepTiming]) -> dict[str, float]:
    """Medians over the steps after the first, which warms caches up."""
    steady = timings[1:] or timings
    if not steady:
        return {}
    names = ("ms", "tokens_per_second", "tflops_per_gpu")
    medians = {name: statistics.median(getattr(t, name) for t in steady) for name in names}
    waited = sum(t.data_wait_ms for t in steady) / sum(t.ms for t in steady)
    return {
        "step_ms": round(medians["ms"], 3),
        "tokens_per_second": round(medians["tokens_per_second"], 1),
        "tflops_per_gpu": round(medians["tflops_per_gpu"], 5),
        "data_wait_share": round(waited, 5),
        "peak_memory_bytes": max(t.memory_bytes for t in timings),
    }
