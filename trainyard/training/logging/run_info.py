"""Facts about a run, for loggers and reports."""

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
    """How TFLOP/s and MFU count operations."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options, flat."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Further figures of the current step by tag. Callbacks before the loggers fill it, and remove
    figures of earlier steps."""
    saves: list[SaveReport] = field(default_factory=list)
    """Costs of saves; several threads append to it, in no order of steps."""

    def conventions(self) -> str:
        """How its speed is counted, in one line."""
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
        """The speed of one step."""
        return timing.tokens_per_second / self.world_size


class NewSaves:
    """The reports of saves that are new since the last call."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._num_taken = 0

    def take(self) -> list[SaveReport]:
        """Reports since the last call."""
        found = self._info.saves[self._num_taken :]
        self._num_taken += len(found)
        return found
