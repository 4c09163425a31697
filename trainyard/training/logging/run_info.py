"""What loggers and reports are told of a run as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard.checkpoint.background import SaveReport
from trainyard.models.family import PER_PARAMETER, FlopConvention
from trainyard.training.loop.throughput import PEAK_CONVENTION, StepTiming, peak_tflops


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run, on one rank."""

    steps: int
    """Optimizer steps of the whole run."""
    samples: int = 0
    """Training samples of the whole run."""
    tokens_per_sample: int = 1
    rank: int = 0
    world_size: int = 1
    device_name: str = "cpu"
    save: str = ""
    """Folder of the run."""
    flops: FlopConvention = PER_PARAMETER
    """What its TFLOP/s and MFU count."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options, flat."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Further figures of this very step, by the tag they are logged under: filled by callbacks that
    stand before the loggers, which also remove what is of an earlier step."""
    saves: list[SaveReport] = field(default_factory=list)
    """What saving steps cost, as it becomes known: threads add to it, in no order of steps."""

    def conventions(self) -> str:
        """What its figures of speed count, in a line."""
        peak = peak_tflops(self.device_name)
        mfu = f"MFU is the {PEAK_CONVENTION}, {peak} TFLOP/s"
        if peak is None:
            mfu = f"no MFU, as the peak of {self.device_name} is not known"
        return f"{self.flops.name} ({self.flops.meaning}); {mfu}"

    def mfu(self, tflops_per_gpu: float) -> float | None:
        """Share of the peak (PEAK_CONVENTION); None for a device of unknown peak."""
        peak = peak_tflops(self.device_name)
        return None if peak is None else tflops_per_gpu / peak

    def tokens_per_second_per_gpu(self, timing: StepTiming) -> float:
        """Of one step."""
        return timing.tokens_per_second / self.world_size


class NewSaves:
    """What saves cost, each told once to one who asks."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._num_told = 0

    def take(self) -> list[SaveReport]:
        """Those that were done since this was asked."""
        found = self._info.saves[self._num_told :]
        self._num_told += len(found)
        return found
