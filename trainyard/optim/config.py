"""Optimizer and schedules, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import also, check_above_zero, check_at_least, course, execution, flag
from trainyard.errors import ConfigError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
OptimizerKind = Literal["adam", "muon", "lion", "sgd"]
OptimizerBackend = Literal["auto", "triton", "torch", "apex", "transformer_engine"]
IncreaseStyle = Literal["constant", "linear", "cosine"]
MOMENTA = (
    *("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2"),
    *("muon_momentum", "sgd_momentum"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its learning rate and weight decay over the run, and gradient clipping."""

    optimizer: OptimizerKind = "adam"
    """Update rule: adam, lion or muon, all with decoupled weight decay, or sgd with momentum. muon
    updates the matrices of the layers; --muon-scalar-optimizer updates the rest."""
    lr: float = course()
    """Highest learning rate."""
    min_lr: float = course(0.0)
    """Learning rate at the end of the decay and after it."""
    lr_decay_style: DecayStyle = course("linear")
    """How the learning rate falls after the warm-up."""
    lr_decay_iters: int | None = course(None)
    """Iterations until the lowest learning rate; unset: all of them."""
    lr_decay_samples: int | None = course(None)
    """Samples until the lowest learning rate, with --train-samples; unset: all of them."""
    lr_warmup_iters: int = course(0)
    """Iterations over which the learning rate rises."""
    lr_warmup_samples: int = course(0)
    """Samples over which the learning rate rises, with --train-samples."""
    lr_warmup_fraction: float | None = course(None)
    """Share of the decay over which it rises, in place of a number of iterations or samples."""
    lr_warmup_init: float = course(0.0)
    """Learning rate that the warm-up begins with."""
    lr_wsd_decay_iters: int | None = course(None)
    """WSD: iterations of the final decay."""
    lr_wsd_decay_samples: int | None = course(None)
    """WSD: samples of the final decay, with --train-samples."""
    lr_wsd_decay_style: WsdDecayStyle = course("exponential")
    """WSD: shape of the final decay."""
    decoupled_lr: float | None = course(None)
    """Highest learning rate of the word embedding and the output layer; unset: --lr."""
    decoupled_min_lr: float | None = course(None)
    """Their learning rate at the end of the decay; unset: --min-lr."""
    override_opt_param_scheduler: bool = execution(False)
    """If rates differ from the checkpoint's, resume with those of the options."""
    use_checkpoint_opt_param_scheduler: bool = execution(False)
    """If rates differ from the checkpoint's, resume with those of the checkpoint."""
    weight_decay: float = course(0.01)
    """Decoupled weight decay of matrices; biases and other vectors have none."""
    start_weight_decay: float | None = course(None)
    """Weight decay at the beginning, when it changes over the run."""
    end_weight_decay: float | None = course(None)
    """Weight decay at the end, when it changes over the run."""
    weight_decay_incr_style: IncreaseStyle = course("constant")
    """How weight decay changes from one to the other."""
    clip_grad: float = course(1.0)
    """Bound of the gradient's L2 norm over the whole model; 0 for none."""
    adam_beta1: float = course(0.9)
    """Decay of Adam's first moment."""
    adam_beta2: float = course(0.999)
    """Decay of Adam's second moment."""
    adam_eps: float = course(1e-8)
    """Added to the root of Adam's second moment."""
    optimizer_backend: Literal["auto", "triton", "torch", "apex", "transformer_engine"] = execution(
        "auto"
    )
    """Kernel of the update: torch's, or for adam on CUDA one that also writes the 16-bit weights
    (triton), or that of apex or Transformer Engine (if installed); auto: triton for adam on CUDA,
    otherwise torch."""
    optimizer_cpu_offload: bool = execution(False)
    """Keep main parameters and moments in pinned host memory, and update them on the CPU while
    gradients and parameters are copied. On CPU ranks it changes nothing."""
    optimizer_offload_fraction: float = execution(1.0)
    """Share of main parameters and moments that --optimizer-cpu-offload keeps in host memory."""
    lion_beta1: float = course(0.95)
    """Share of the momentum in Lion's update; its paper has 0.95 and 0.98 for language models."""
    lion_beta2: float = course(0.98)
    """Decay of Lion's momentum."""
    muon_momentum: float = course(0.9)
    """Decay of Muon's momentum."""
    muon_use_nesterov: bool = also("muon_nesterov", default=False, role="course")
    """Orthogonalise a mean of gradient and momentum, not the momentum alone."""
    muon_num_ns_steps: int = course(5)
    """Newton-Schulz iterations, which bring all singular values near 1."""
    muon_coefficient_type: Literal["quintic", "simple"] = course("quintic")
    """Polynomials of the Newton-Schulz iterations: quintic, one tuned for each of five; simple,
    that of Muon's author."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = course("spectral")
    """Factor of an (out, in) update: sqrt(max(out, in)) (spectral), sqrt(out / in) (unit_rms_norm)
    or sqrt(max(1, out / in)) (shape_scaling)."""
    muon_extra_scale_factor: float = course(1.0)
    """One more factor; with spectral, 0.2 gives steps the size of AdamW's (arXiv:2502.16982)."""
    muon_split_qkv: bool = course(True)
    """Orthogonalise queries, keys and values separately, not as one matrix."""
    muon_tp_mode: Literal["duplicated", "distributed", "blockwise"] = course("duplicated")
    """How to orthogonalise matrices that tensor-parallel ranks share: gather them on every rank
    (duplicated); keep them in place and sum over the ranks (distributed); or treat each part as a
    matrix (blockwise), which depends on --tensor-model-parallel-size."""
    muon_fp32_matmul_prec: Literal["low", "medium", "high"] = course("medium")
    """Precision of Muon's matrix products on CUDA, by the names of
    torch.set_float32_matmul_precision; low is treated as medium."""
    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    """Update rule for all parameters that muon does not update."""
    sgd_momentum: float = course(0.9)
    """Share of the last step that SGD keeps."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        self._check_rates()
        self._check_warmup()
        self._check_weight_decay()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler "
                "contradict each other; give one"
            )
        if self.optimizer != "adam" and self.optimizer_backend not in ("auto", "torch"):
            raise ConfigError(
                f"--optimizer-backend {self.optimizer_backend} has a kernel for --optimizer adam, "
                f"not for {self.optimizer}; leave it out"
            )
        for name in MOMENTA:
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{flag(name)} must be in [0, 1), got {getattr(self, name)}")
        check_at_least(self, 0, "clip_grad", "adam_eps")
        if not 0.0 <= self.optimizer_offload_fraction <= 1.0:
            raise ConfigError(
                f"--optimizer-offload-fraction must be in [0, 1], got "
                f"{self.optimizer_offload_fraction}"
            )
        if self.optimizer_cpu_offload and self.optimizer == "muon":
            raise ConfigError(
                "--optimizer-cpu-offload and --optimizer muon exclude each other: orthogonalising "
                "needs a GPU; leave the first out, and give --use-distributed-optimizer, which "
                "spreads the state over the data-parallel ranks"
            )
        check_at_least(self, 1, "muon_num_ns_steps")
        check_above_zero(self, "muon_extra_scale_factor")

    @property
    def offloaded(self) -> float:
        """The share of the state that is in host memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    def _check_rates(self) -> None:
        if not 0.0 <= self.min_lr <= self.lr:
            raise ConfigError(
                f"--min-lr ({self.min_lr}) must be at least 0 and at most --lr ({self.lr})"
            )
        if not 0.0 <= self.lr_warmup_init <= self.lr:
            raise ConfigError(
                f"--lr-warmup-init ({self.lr_warmup_init}) must be between 0 and --lr ({self.lr})"
            )
        lengths = ("lr_decay_iters", "lr_decay_samples")
        check_at_least(self, 1, *lengths, "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        wsd_lengths = (self.lr_wsd_decay_iters, self.lr_wsd_decay_samples)
        if (self.lr_decay_style == "WSD") != (wsd_lengths != (None, None)):
            raise ConfigError(
                "--lr-decay-style WSD and --lr-wsd-decay-iters (or --lr-wsd-decay-samples) go "
                "together"
            )
        self._check_decoupled_rates()

    def _check_decoupled_rates(self) -> None:
        if self.decoupled_lr is None:
            if self.decoupled_min_lr is not None:
                raise ConfigError("--decoupled-min-lr needs --decoupled-lr")
            return
        least = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        if not 0.0 <= least <= self.decoupled_lr:
            name = "--min-lr" if self.decoupled_min_lr is None else "--decoupled-min-lr"
            raise ConfigError(
                f"{name} ({least}) must be at least 0 and at most --decoupled-lr "
                f"({self.decoupled_lr}); give --decoupled-min-lr"
            )

    def _check_warmup(self) -> None:
        check_at_least(self, 0, "lr_warmup_iters", "lr_warmup_samples")
        if self.lr_warmup_fraction is None:
            return
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if getattr(self, name):
                raise ConfigError(f"give --lr-warmup-fraction or {flag(name)}, not both")
        if not 0.0 <= self.lr_warmup_fraction < 1.0:
            raise ConfigError(
                f"--lr-warmup-fraction must be in [0, 1), got {self.lr_warmup_fraction}"
            )

    def _check_weight_decay(self) -> None:
        ends = (self.start_weight_decay, self.end_weight_decay)
        if self.weight_decay_incr_style == "constant" and ends != (None, None):
            raise ConfigError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style "
                "linear or cosine; with constant, give --weight-decay"
            )
        if self.weight_decay_incr_style != "constant" and None in ends:
            raise ConfigError(
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs "
                "--start-weight-decay and --end-weight-decay"
            )
        check_at_least(self, 0, "weight_decay", "start_weight_decay", "end_weight_decay")
