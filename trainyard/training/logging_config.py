"""What a run tells of itself while it lasts, under Megatron-LM's names. Standard library only; none
of it changes what a run makes."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import execution
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Console, metrics files, TensorBoard, Weights & Biases, timers and memory."""

    log_interval: int = execution(100)
    """Steps between two lines on the console."""
    log_throughput: bool = execution(False)
    """Show tokens/s, TFLOP/s and model FLOPs utilisation per GPU in those lines."""
    log_params_norm: bool = execution(False)
    """Measure the L2 norm of all parameters at every step."""
    log_num_zeros_in_grad: bool = execution(False)
    """Count the zeros of the gradient at every step."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, in words."""
        if self.log_interval < 1:
            raise ConfigError(f"--log-interval must be at least 1, got {self.log_interval}")
