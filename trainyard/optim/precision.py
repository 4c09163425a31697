"""Number formats of training and the loss scale, under Megatron-LM's names. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import check_above_zero, check_at_least, course, execution
from trainyard.errors import ConfigError
from trainyard.fp8.recipe import Fp8Recipe

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
    loss_scale: float | None = course(None)
    """Constant scale of the loss with --fp16; unset: one that adapts."""
    initial_loss_scale: float = course(2.0**32)
    """Scale that an adapting one begins with."""
    min_loss_scale: float = course(1.0)
    """Scale that an adapting one does not go below."""
    loss_scale_window: int = course(1000)
    """Steps without overflow after which the scale is doubled."""
    hysteresis: int = course(2)
    """Overflows since the last doubling from which on each halves the scale."""
    use_precision_aware_optimizer: bool = False
    """Refused: keep the optimizer's state in fewer bits, which is not implemented."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """With --bf16, compute the matrix products of the layers in 8-bit floating point: e4m3, or e5m2
    for gradients (hybrid). Weights, attention and output layer stay in bfloat16."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """How 8-bit tensors are scaled: by their present maximum (tensorwise); the others are not
    implemented."""
    first_last_layers_bf16: bool = False
    """Keep the products of some first and last layers in bfloat16 with --fp8-format."""
    num_layers_at_start_in_bf16: int = 1
    """First layers that --first-last-layers-bf16 keeps."""
    num_layers_at_end_in_bf16: int = 1
    """Last layers that --first-last-layers-bf16 keeps."""

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
        self._check_fp8()

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

    def _check_fp8(self) -> None:
        if self.fp8_format is not None and not self.bf16:
            raise ConfigError(
                f"--fp8-format {self.fp8_format} needs --bf16, the format of weights and of all "
                "that is not a matrix product"
            )
        if self.fp8_format is not None and self.fp8_recipe != "tensorwise":
            raise ConfigError(
                f"--fp8-recipe {self.fp8_recipe} is not implemented; give tensorwise, which scales "
                "by the maximum of the tensor itself, or leave it out"
            )
        check_at_least(self, 0, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")

    @property
    def fp8(self) -> Fp8Recipe | None:
        """Of the products of the layers; None: they have the format of the weights."""
        return None if self.fp8_format is None else Fp8Recipe(self.fp8_format)

    @property
    def bf16_layers(self) -> tuple[int, int]:
        """First and last layers whose products stay in 16 bits with `fp8`."""
        if not self.first_last_layers_bf16:
            return 0, 0
        return self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16

    @property
    def params_format(self) -> NumberFormat:
        """Format of weights, activations and communicated activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def grads_format(self) -> NumberFormat:
        """Format in which gradients are added up."""
        return "bf16" if self.grad_reduce_in_bf16 else "fp32"
