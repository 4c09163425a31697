"""Speed and memory of steps, MFU, and waits for data. No part of the result of a run."""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, overload

import torch

from trainyard.parallel.device import peak_memory_bytes

PEAK_CONVENTION = "share of the dense bf16 peak of the datasheet"
"""Definition of MFU for reports; operations are counted by `trainyard.models.costs.flops`."""

PEAK_TFLOPS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 PCIe", 756.5),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("RTX 6000 Ada", 364.2),
    ("V100", 125.0),
    ("MI355X", 2516.6),
    ("MI350X", 2300.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)
"""(part of the device name, dense bf16 TFLOP/s, fp16 on devices without bf16); the first match
counts."""


def peak_tflops(device_name: str) -> float | None:
    """Dense 16-bit peak of a device in TFLOP/s; None for a CPU or an unknown device."""
    words = device_name.lower().replace("-", " ")
    for part, tflops in PEAK_TFLOPS:
        if f" {part.lower()} " in f" {words} ":
            return tflops
    return None


FILE = "timings.jsonl"


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Speed and memory of one step."""

    step: int
    ms: float
    """Wall time of the step with data loading, without validation and checkpoints."""
    tokens_per_second: float
    """Summed over all ranks."""
    tflops_per_gpu: float
    """10^12 operations per second and device, counted by the model family."""
    data_wait_ms: float
    """Part of `ms` spent waiting for the loader."""
    memory_bytes: int
    """Peak of rank 0 so far: allocated on its CUDA device, else resident in the process."""

    def line(self) -> str:
        """The JSON line of `timings.jsonl`."""
        return json.dumps({name: _rounded(value) for name, value in asdict(self).items()})


def _rounded(value: float) -> float:
    return round(value, 3) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens and operations of a sample."""

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
        """The timing of a step of `num_samples` samples in `seconds`."""
        return StepTiming(
            step,
            1000.0 * seconds,
            num_samples * self.tokens_per_sample / seconds,
            num_samples * self.flops_per_sample / (seconds * 1e12 * self.world_size),
            1000.0 * data_wait_seconds,
            peak_memory_bytes(device),
        )


class StepTimings(Sequence[StepTiming]):
    """The timings of many steps, in 48 bytes a step."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {
            field.name: array("d" if field.type == "float" else "q") for field in fields(StepTiming)
        }

    def append(self, timing: StepTiming) -> None:
        """Add a step."""
        for name, column in self._columns.items():
            column.append(getattr(timing, name))

    def __len__(self) -> int:
        return len(self._columns["step"])

    @overload
    def __getitem__(self, place: int) -> StepTiming: ...

    @overload
    def __getitem__(self, place: slice) -> StepTimings: ...

    def __getitem__(self, place: int | slice) -> StepTiming | StepTimings:
        if isinstance(place, int):
            return StepTiming(**{name: c[place] for name, c in self._columns.items()})
        part = StepTimings()
        part._columns = {name: column[place] for name, column in self._columns.items()}
        return part


def summary(timings: Sequence[StepTiming]) -> dict[str, float]:
    """Medians over the steps after the first, which is a warm-up."""
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


T = TypeVar("T")


def _nothing() -> None:
    pass


class DataWait:
    """Measures the time that training waits for batches.

    On CUDA the host runs ahead of the device, so a short wait may be hidden. A wait of several per
    cent means that the loader is the bottleneck."""

    def __init__(self, beat: Callable[[], None] = _nothing) -> None:
        """beat: called for every batch, as a sign of progress."""
        self._beat = beat
        self._seconds = 0.0

    def watch(self, batches: Iterator[T]) -> Iterator[T]:
        """Pass on batches and time how long each took to come."""
        return _Watched(self, batches)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def add(self, seconds: float) -> None:
        """Add a wait for a batch."""
        self._seconds += seconds
        self._beat()


class _Watched(Iterator[T]):
    def __init__(self, wait: DataWait, batches: Iterator[T]) -> None:
        self._wait = wait
        self._batches = batches

    def __next__(self) -> T:
        began = time.perf_counter()
        batch = next(self._batches)
        self._wait.add(time.perf_counter() - began)
        return batch
