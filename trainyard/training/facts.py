"""What loggers and reports are told of a run as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard.training.metrics import StepTiming
from trainyard.training.peaks import peak_tflops


@dataclass(frozen=True, slots=True)
class RunFacts:
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
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options, flat."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Further figures of this very step, by the tag they are logged under: filled by callbacks that
    stand before the loggers, which also remove what is of an earlier step."""

    def mfu(self, tflops_per_gpu: float) -> float | None:
        """Share of the device's peak (peaks.CONVENTION); None where the peak is not known."""
        peak = peak_tflops(self.device_name)
        return None if peak is None else tflops_per_gpu / peak

    def tokens_per_second_per_gpu(self, timing: StepTiming) -> float:
        """Of one step."""
        return timing.tokens_per_second / self.world_size
