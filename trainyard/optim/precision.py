"""Number formats of training and the loss scale, under Megatron-LM's names. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import check_above_zero, check_at_least, execution
from trainyard.errors import ConfigError

NumberFormat = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """fp32, or 16-bit weights and computation beside fp32 main parameters and gradients."""

    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps parameters in fp32."""
    fp16: bool = False
    """Compute in float16 with a scaled loss; the optimizer keeps parameters in fp32."""
    accumulate_allreduce_grads_in_fp32: bool = execution(False)
    """Add gradients up in fp32; the default, unless --grad-reduce-in-bf16 is given."""
    grad_reduce_in_bf16: bool = False
    """Add gradients up in bfloat16, over micro-batches and ranks: half the memory and traffic."""
    loss_scale: float | None = None
    """Constant scale of the loss with --fp16; unset: one that adapts."""
    initial_loss_scale: float = 2.0**32
    """Scale that an adapting one begins with."""
    min_loss_scale: float = 1.0
    """Scale that an adapting one does not go below."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """Overflows since the last doubling from which on each halves the scale."""
    use_precision_aware_optimizer: bool = False
    """Refused: keep the optimizer's state in fewer bits, which is not implemented."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if self.bf16 and self.fp16:
            raise ConfigError("give --bf16 or --fp16, not both")
        if self.use_precision_aware_optimizer:
            raise ConfigError(
                "--use-precision-aware-optimizer (and the dtypes of gradients, main parameters and "
                "moments that it allows) comes later; leave it out: the state is fp32, and "
                "--use-distributed-optimizer spreads it over the data-parallel ranks"
            )
        if self.grad_reduce_in_bf16 and not self.bf16:
            raise ConfigError("--grad-reduce-in-bf16 needs --bf16")
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise ConfigError(
                "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16 contradict each "
                "other; give one"
            )
        self._check_scale()

    def _check_scale(self) -> None:
        if self.loss_scale is not None and not self.fp16:
            raise ConfigError(
                "--loss-scale is for --fp16: other formats do not lose small gradients"
            )
        check_above_zero(self, "loss_scale", "initial_loss_scale", "min_loss_scale")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"--min-loss-scale ({self.min_loss_scale}) must be at most --initial-loss-scale "
                f"({self.initial_loss_scale})"
            )
        check_at_least(self, 1, "loss_scale_window", "hysteresis")

    @property
    def params_format(self) -> NumberFormat:
        """Format of weights, activations and communicated activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def grads_format(self) -> NumberFormat:
        """Format in which gradients are added up."""
        return "bf16" if self.grad_reduce_in_bf16 else "fp32"
