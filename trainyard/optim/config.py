"""Optimizer and schedules, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.errors import ConfigError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning rate and weight decay over the run, and gradient clipping."""

    lr: float
    """Highest learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay and after it."""
    lr_decay_style: DecayStyle = "linear"
    """How the learning rate falls after the warm-up."""
    lr_decay_iters: int | None = None
    """Iterations until the lowest learning rate; unset: all of them."""
    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises."""
    lr_warmup_fraction: float | None = None
    """Share of the decay iterations over which it rises, in place of --lr-warmup-iters."""
    lr_warmup_init: float = 0.0
    """Learning rate that the warm-up begins with."""
    lr_wsd_decay_iters: int | None = None
    """WSD: iterations of the final decay."""
    lr_wsd_decay_style: WsdDecayStyle = "exponential"
    """WSD: shape of the final decay."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and other vectors have none."""
    start_weight_decay: float | None = None
    """Weight decay at the beginning, when it changes over the run."""
    end_weight_decay: float | None = None
    """Weight decay at the end, when it changes over the run."""
    weight_decay_incr_style: IncreaseStyle = "constant"
    """How weight decay goes from one to the other."""
    clip_grad: float = 1.0
    """Bound of the gradient's L2 norm over the whole model; 0 for none."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, in words."""
        self._check_rates()
        self._check_warmup()
        self._check_weight_decay()
        for name in ("adam_beta1", "adam_beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{_flag(name)} must be in [0, 1), got {getattr(self, name)}")
        for name in ("clip_grad", "adam_eps"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{_flag(name)} must be at least 0, got {getattr(self, name)}")

    def _check_rates(self) -> None:
        if not 0.0 <= self.min_lr <= self.lr:
            raise ConfigError(
                f"--min-lr ({self.min_lr}) must be at least 0 and at most --lr ({self.lr})"
            )
        if not 0.0 <= self.lr_warmup_init <= self.lr:
            raise ConfigError(
                f"--lr-warmup-init ({self.lr_warmup_init}) must be between 0 and --lr ({self.lr})"
            )
        for name in ("lr_decay_iters", "lr_wsd_decay_iters"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        if (self.lr_decay_style == "WSD") != (self.lr_wsd_decay_iters is not None):
            raise ConfigError("--lr-decay-style WSD and --lr-wsd-decay-iters go together")

    def _check_warmup(self) -> None:
        if self.lr_warmup_iters < 0:
            raise ConfigError(f"--lr-warmup-iters must be at least 0, got {self.lr_warmup_iters}")
        if self.lr_warmup_fraction is None:
            return
        if self.lr_warmup_iters:
            raise ConfigError("give --lr-warmup-fraction or --lr-warmup-iters, not both")
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
        for name in ("weight_decay", "start_weight_decay", "end_weight_decay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{_flag(name)} must be at least 0, got {value}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
