"""What a run is watched for, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Divergence, faulty machines, ranks that hang or lag behind."""

    check_for_nan_in_loss_and_grad: bool = execution(True)
    """End the run at a loss or gradient that is not finite (--rerun-mode says what is done before);
    otherwise such steps are skipped and counted. With fp16 an overflow is part of the method and
    never ends a run."""
    check_for_spiky_loss: bool = execution(False)
    """With --rerun-mode validate_results, run a step with a spiky loss again too. Spikes are warned
    of in any case."""
    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = execution(
        "validate_results"
    )
    """Run the forward and backward pass of a step again: of one with an impossible result, to tell
    a faulty machine from a fault of the model or the data (validate_results: no step takes longer
    until there is one), or of every step, to see whether it gives the same
    (report_determinism_stats)."""
    hang_timeout_minutes: float | None = execution(None)
    """End a run that made no progress for so long, with the stack of every rank; unset: 30 median
    steps and at least 10 minutes (an hour while a checkpoint is written), once there were steps;
    0: never."""
    log_straggler: bool = execution(False)
    """Show at every --log-interval which ranks compute longest."""
    straggler_minmax_count: int = execution(1)
    """Ranks to name as fastest and as slowest."""
    check_weight_hash_across_dp_replicas_interval: int | None = execution(None)
    """Steps between two checks that data-parallel replicas hold the same weights, bit for bit."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, in words."""
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
                "--check-for-spiky-loss says what --rerun-mode validate_results looks for, and "
                f"--rerun-mode is {self.rerun_mode}; give that too, or leave it out (spikes are "
                "warned of anyway)"
            )
