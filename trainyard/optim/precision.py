"""Number formats of training and the loss scale, under Megatron-LM's names. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import (
    check_above_zero,
    check_at_least,
    check_at_most,
    course,
    execution,
    flag,
)
from trainyard.errors import ConfigError
from trainyard.fp8.recipe import AmaxAlgorithm, Fp8Recipe

NumberFormat = Literal["fp32", "bf16", "fp16"]
MomentFormat = Literal["fp32", "fp16", "bf16", "fp8"]
"""Formats of Adam's moments in Megatron-LM; here fp32 and bf16."""
MAX_HISTORY = 2**16
"""Steps of --fp8-amax-history-len; 1024 are usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """fp32, or 16-bit weights and computation beside fp32 main parameters."""

    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps parameters in fp32."""
    fp16: bool = False
    """Compute in float16 with a scaled loss; the optimizer keeps parameters in fp32."""
    accumulate_allreduce_grads_in_fp32: bool = execution(False)
    """Sum gradients in fp32; the default, unless --grad-reduce-in-bf16 is given."""
    grad_reduce_in_bf16: bool = False
    """Sum gradients in bfloat16, over micro-batches and ranks: half the memory and traffic."""
    grad_reduce_in_fp16: bool = False
    """Sum scaled gradients in float16, over micro-batches and ranks, as Megatron-LM does with
    --fp16 alone: half the memory and traffic, but a sum that overflows skips its step."""
    loss_scale: float | None = course(None)
    """Constant scale of the loss with --fp16; unset: a dynamic scale."""
    initial_loss_scale: float = course(2.0**32)
    """First value of a dynamic loss scale."""
    min_loss_scale: float = course(1.0)
    """Lowest value of a dynamic loss scale."""
    loss_scale_window: int = course(1000)
    """Steps without overflow after which the scale is doubled."""
    hysteresis: int = course(2)
    """Number of overflows since the last doubling after which each further one halves the scale."""
    use_precision_aware_optimizer: bool = False
    """Allow --main-grads-dtype, --exp-avg-dtype and --exp-avg-sq-dtype other than fp32."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which gradients are summed and passed to the optimizer; bf16 is the same as
    --grad-reduce-in-bf16."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Format of the optimizer's parameters beside 16-bit weights; fp16 is not implemented."""
    exp_avg_dtype: MomentFormat = "fp32"
    """Format of Adam's first moment between steps, fp32 or bf16; an update computes in fp32."""
    exp_avg_sq_dtype: MomentFormat = "fp32"
    """Format of Adam's second moment between steps, fp32 or bf16."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """With --bf16, compute the matrix products of the layers in 8-bit floating point: e4m3, or e5m2
    for gradients (hybrid). Weights, attention and output layer stay in bfloat16."""
    fp8_recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"] = "tensorwise"
    """tensorwise: one scale from the tensor's maximum; delayed: from maxima of past steps
    (Megatron-LM's default); rowwise: one per row (torchao); blockwise: 128 x 128 blocks of weights,
    128 numbers of inputs and gradients (DeepSeek-V3; needs --fp8-format e4m3). mxfp8 is not
    implemented."""
    fp8_backend: Literal["torch", "transformer_engine"] | None = execution(None)
    """Kernels of casts and products with --fp8-format: torch and trainyard's own (the default), or
    Transformer Engine's where it is installed, for recipes that it has: delayed, tensorwise,
    blockwise."""
    fp8_margin: int = 0
    """With --fp8-recipe delayed, leave room for this many doublings of the maximum."""
    fp8_amax_history_len: int = 1
    """With --fp8-recipe delayed, steps whose maxima are kept."""
    fp8_amax_compute_algo: AmaxAlgorithm = "most_recent"
    """With --fp8-recipe delayed, which of the kept maxima scales: the last, or the largest."""
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
        self._check_states()
        self._check_gradients()
        self._check_scale()
        self._check_fp8()

    def _check_states(self) -> None:
        names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        for name in names:
            value = getattr(self, name)
            if value != "fp32" and not self.use_precision_aware_optimizer:
                raise ConfigError(
                    f"{flag(name)} {value} needs --use-precision-aware-optimizer, which is not "
                    "given"
                )
            if value not in ("fp32", "bf16"):
                raise ConfigError(
                    f"{flag(name)} {value} is not implemented: its range needs a scale for every "
                    "tensor; give "
                    + ("fp32" if name == "main_params_dtype" else "bf16, which needs none, or fp32")
                )

    def _check_gradients(self) -> None:
        sixteen = {
            "--grad-reduce-in-bf16": ("--bf16", self.grad_reduce_in_bf16, self.bf16),
            "--main-grads-dtype bf16": ("--bf16", self.main_grads_dtype == "bf16", self.bf16),
            "--grad-reduce-in-fp16": ("--fp16", self.grad_reduce_in_fp16, self.fp16),
        }
        for option, (needed, is_given, is_met) in sixteen.items():
            if is_given and not is_met:
                raise ConfigError(f"{option} needs {needed}")
            if is_given and self.accumulate_allreduce_grads_in_fp32:
                raise ConfigError(
                    f"--accumulate-allreduce-grads-in-fp32 and {option} contradict each other; "
                    "give one"
                )

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
        if self.fp8_format is not None and self.fp8_recipe == "mxfp8":
            raise ConfigError(
                "--fp8-recipe mxfp8 is not implemented; give blockwise, which scales each 128 "
                "numbers, or tensorwise"
            )
        if self.fp8_format == "hybrid" and self.fp8_recipe == "blockwise":
            raise ConfigError(
                "--fp8-format hybrid and --fp8-recipe blockwise: torch has no blockwise products "
                "of e5m2; give --fp8-format e4m3, whose range a scale for each 128 numbers suits"
            )
        if self.fp8_recipe == "rowwise" and self.fp8_backend == "transformer_engine":
            raise ConfigError(
                "--fp8-backend transformer_engine has no recipe rowwise; give --fp8-recipe "
                "tensorwise, delayed or blockwise, or --fp8-backend torch"
            )
        check_at_least(self, 0, "fp8_margin")
        check_at_least(self, 1, "fp8_amax_history_len")
        check_at_most(self, MAX_HISTORY, "fp8_amax_history_len")
        check_at_least(self, 0, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")

    @property
    def fp8(self) -> Fp8Recipe | None:
        """Of the products of the layers; None: they have the format of the weights."""
        if self.fp8_format is None:
            return None
        assert self.fp8_recipe != "mxfp8", "refused"
        backend = self.fp8_backend or "torch"
        if self.fp8_recipe == "delayed":
            history = (self.fp8_margin, self.fp8_amax_history_len, self.fp8_amax_compute_algo)
            return Fp8Recipe(self.fp8_format, "delayed", *history, backend=backend)
        return Fp8Recipe(self.fp8_format, self.fp8_recipe, backend=backend)

    @property
    def has_idle_history(self) -> bool:
        """Whether options of delayed scaling are given without it."""
        given = (self.fp8_margin, self.fp8_amax_history_len, self.fp8_amax_compute_algo)
        return self.fp8_recipe != "delayed" and given != (0, 1, "most_recent")

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
        if self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16":
            return "bf16"
        return "fp16" if self.grad_reduce_in_fp16 else "fp32"

    def keeps_gradients(
        self, optimizer: str, *, num_microbatches: int | None, world_size: int
    ) -> bool:
        """Whether gradients stay in the format of the weights: nothing is added up, so a wider sum
        would hold the same numbers. num_microbatches: the most of a step. Adam reads them once;
        the others compute in them."""
        alone = num_microbatches == world_size == 1
        return alone and optimizer == "adam" and not self.accumulate_allreduce_grads_in_fp32

    @property
    def moment_formats(self) -> dict[str, NumberFormat]:
        """Of Adam's moments that are not kept in the format of the main parameters, by name."""
        found = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return {name: "bf16" for name, kept in found.items() if kept == "bf16"}

    @property
    def moment_bytes(self) -> int:
        """Of a parameter's two moments of Adam."""
        return 8 - 2 * len(self.moment_formats)
