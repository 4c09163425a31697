"""Learning rate and weight decay at each point of a run, equal to Megatron-LM's to the last digit.

A step here is a sample, not an iteration: a run of a growing batch size follows the same curve.
Pure arithmetic in the standard library, in the order that gives the same floats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.optim.config import DecayStyle, IncreaseStyle, OptimizerConfig, WsdDecayStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Warm-up, then decay."""

    init_lr: float
    max_lr: float
    min_lr: float
    warmup_steps: float
    decay_steps: int
    style: DecayStyle
    wsd_decay_steps: int = 0
    wsd_style: WsdDecayStyle = "exponential"

    def at(self, n: int) -> float:
        """The learning rate after n samples."""
        if self.warmup_steps > 0 and n <= self.warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * float(n) / float(self.warmup_steps)
        if self.style == "constant":
            return self.max_lr
        if n > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            rate: float = self.max_lr * max(self.warmup_steps, 1) ** 0.5 / max(n, 1) ** 0.5
            return max(self.min_lr, rate)
        return self.min_lr + self._coefficient(n) * (self.max_lr - self.min_lr)

    def _coefficient(self, n: int) -> float:
        """1 at the end of the warm-up, 0 at the end of the decay."""
        if self.style == "WSD":
            decay_begins = self.decay_steps - self.wsd_decay_steps
            if n <= decay_begins:
                return 1.0
            return wsd_coefficient((n - decay_begins) / self.wsd_decay_steps, self.wsd_style)
        ratio = float(n - self.warmup_steps) / float(self.decay_steps - self.warmup_steps)
        return 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)


def wsd_coefficient(ratio: float, style: WsdDecayStyle) -> float:
    """The final decay of warm-up, stable, decay; `ratio` of it is over."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    return 1.0 - math.sqrt(ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDecaySchedule:
    """From one weight decay to another over the run."""

    start: float
    end: float
    steps: int
    style: IncreaseStyle

    def at(self, n: int) -> float:
        """The weight decay after n samples."""
        if self.style == "constant" or n > self.steps:
            return self.end
        ratio = float(n) / float(self.steps)
        if self.style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start + ratio * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Both rates."""

    learning_rate: LearningRateSchedule
    weight_decay: WeightDecaySchedule


def build_schedule(config: OptimizerConfig, train_iters: int, global_batch_size: int) -> Schedule:
    """The schedules of a run; numbers of iterations become numbers of samples."""
    decay_iters = config.lr_decay_iters or train_iters
    if config.lr_warmup_fraction is not None:
        warmup_steps: float = config.lr_warmup_fraction * (decay_iters * global_batch_size)
    else:
        warmup_steps = config.lr_warmup_iters * global_batch_size
    if warmup_steps >= decay_iters * global_batch_size:
        raise ConfigError(
            f"--lr-warmup-iters ({config.lr_warmup_iters}) must be less than --lr-decay-iters "
            f"({decay_iters}; all of --train-iters unless given)"
        )
    wsd_iters = config.lr_wsd_decay_iters or 0
    if wsd_iters > decay_iters:
        raise ConfigError(
            f"--lr-wsd-decay-iters ({wsd_iters}) must be at most --lr-decay-iters ({decay_iters}; "
            "all of --train-iters unless given)"
        )
    constant = config.weight_decay
    start, end = config.start_weight_decay, config.end_weight_decay
    return Schedule(
        LearningRateSchedule(
            init_lr=config.lr_warmup_init,
            max_lr=config.lr,
            min_lr=config.min_lr,
            warmup_steps=warmup_steps,
            decay_steps=decay_iters * global_batch_size,
            style=config.lr_decay_style,
            wsd_decay_steps=wsd_iters * global_batch_size,
            wsd_style=config.lr_wsd_decay_style,
        ),
        WeightDecaySchedule(
            start=constant if start is None else start,
            end=constant if end is None else end,
            steps=train_iters * global_batch_size,
            style=config.weight_decay_incr_style,
        ),
    )
