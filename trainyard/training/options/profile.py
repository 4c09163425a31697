"""Profiles of a few steps and of the device's memory, under Megatron-LM's names. None of it changes
the result. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import check_at_least, execution
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which steps of which ranks are profiled, and how."""

    profile: bool = execution(False)
    """Profile the steps after --profile-step-start up to --profile-step-end: as ranges for nsys, or
    with --use-pytorch-profiler as a trace in logs/ of --save."""
    profile_step_start: int = execution(10)
    """Profile from the end of this step on."""
    profile_step_end: int = execution(12)
    """The last step to profile."""
    profile_ranks: tuple[int, ...] = execution((0,))
    """Ranks to profile."""
    use_pytorch_profiler: bool = execution(False)
    """With --profile: write a trace of torch's profiler, for Perfetto or chrome://tracing."""
    record_memory_history: bool = execution(False)
    """Record every allocation on the CUDA device of --profile-ranks, and write a snapshot for
    pytorch.org/memory_viz to logs/ of --save when the run ends or fails."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_at_least(self, 0, "profile_step_start")
        if self.profile_step_end <= self.profile_step_start:
            raise ConfigError(
                f"--profile-step-end {self.profile_step_end} must be above --profile-step-start "
                f"{self.profile_step_start}, after which the first profiled step begins"
            )
        if self.use_pytorch_profiler and not self.profile:
            raise ConfigError("--use-pytorch-profiler needs --profile, which profiles; give it too")
