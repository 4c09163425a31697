"""Checks of a running training, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Divergence, faulty machines, ranks that hang or lag behind."""

    check_for_nan_in_loss_and_grad: bool = execution(True)
    """End the run at a NaN or Inf in loss or gradient (after the rerun of --rerun-mode); otherwise
    skip and count such steps. In fp16 an overflow is expected and never ends a run."""
    check_for_spiky_loss: bool = execution(False)
    """With --rerun-mode validate_results, rerun a step with a loss spike too. Spikes log a warning
    in any case."""
    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = execution(
        "validate_results"
    )
    """Repeat the forward and backward pass of a step. validate_results: only after a NaN or Inf, to
    find out whether a machine is faulty or the model or data is the cause; costs nothing until
    then. report_determinism_stats: every step, to see whether its result is the same."""
    hang_timeout_minutes: float | None = execution(None)
    """End a run after this long without progress, and save the stacks of every rank. Unset: 30
    median steps, at least 10 minutes (an hour while a checkpoint is written), once some steps are
    done. 0: never."""
    log_straggler: bool = execution(False)
    """Show the slowest ranks at every --log-interval."""
    straggler_minmax_count: int = execution(1)
    """Number of fastest and of slowest ranks to show."""
    check_weight_hash_across_dp_replicas_interval: int | None = execution(None)
    """Steps between two checks that data-parallel replicas have the same weights, bit for bit."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        interval = self.check_weight_hash_across_dp_replicas_interval
        if interval is not None and interval < 1:
            raise ConfigError(
                "--check-weight-hash-across-dp-replicas-interval must be at least 1, got "
                f"{interval}"
            )
        if self.straggler_minmax_count < 1:
            raise ConfigError(
                f"--straggler-minmax-count must be at least 1, got {self.straggler_minmax_count}"
            )
        if self.hang_timeout_minutes is not None and self.hang_timeout_minutes < 0:
            raise ConfigError(
                f"--hang-timeout-minutes must be at least 0, got {self.hang_timeout_minutes}"
            )
        if self.check_for_spiky_loss and self.rerun_mode != "validate_results":
            raise ConfigError(
                "--check-for-spiky-loss needs --rerun-mode validate_results, and --rerun-mode is "
                f"{self.rerun_mode}; change that, or leave this out (spikes log a warning anyway)"
            )
