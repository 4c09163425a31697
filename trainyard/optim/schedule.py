"""Learning rate and weight decay at each point of a run, equal to Megatron-LM's to the last digit.

A step here is a sample, not an iteration: a run of a growing batch size follows the same curve.
Pure arithmetic in the standard library, in the order that gives the same floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainyard.config import flag
from trainyard.errors import ConfigError
from trainyard.optim.config import DecayStyle, IncreaseStyle, OptimizerConfig, WsdDecayStyle

SamplesAfter = Callable[[int], int]
"""The samples that this many iterations from the start consume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Warm-up, then decay. Lengths are numbers of samples."""

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
class Rates:
    """Learning rate and weight decay of one step."""

    learning_rate: float
    weight_decay: float
    decoupled_learning_rate: float
    """Of the word embedding and the output layer; that of the others without --decoupled-lr."""


@dataclass(frozen=True, slots=True)
class OptimizerSchedule:
    """Learning rate and weight decay over a run."""

    learning_rate: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    decoupled: LearningRateSchedule | None = None
    """The learning rate of --decoupled-lr."""

    def at(self, n: int) -> Rates:
        """The rates of the step after n samples."""
        rate = self.learning_rate.at(n)
        other = rate if self.decoupled is None else self.decoupled.at(n)
        return Rates(rate, self.weight_decay.at(n), other)


# --- from options -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Parts of a run in samples, each with the option that says it."""

    decay: int
    warmup: float
    wsd: int
    run: int
    decay_option: str
    warmup_option: str
    wsd_option: str

    def check(self) -> None:
        """Refuse parts that are longer than what they are parts of."""
        if self.warmup >= self.decay:
            raise ConfigError(
                f"{self.warmup_option}: the learning rate would rise over {self.warmup:g} samples "
                f"and must have reached --lr before the end of its decay at {self.decay} "
                f"({self.decay_option}; the whole run unless given)"
            )
        if self.wsd > self.decay:
            raise ConfigError(
                f"{self.wsd_option}: {self.wsd} samples must be at most those of the whole decay, "
                f"{self.decay} ({self.decay_option}; the whole run unless given)"
            )


def build_optimizer_schedule(
    config: OptimizerConfig,
    train_iters: int | None,
    global_batch_size: int,
    train_samples: int | None = None,
    samples_after: SamplesAfter | None = None,
) -> OptimizerSchedule:
    """The schedules of a run that is measured in iterations or, with None for these, in samples.

    samples_after: of a batch size that changes, the samples of this many iterations from the start;
    unset: all have the given batch size."""
    if train_iters is not None:
        of_constant_size = global_batch_size.__mul__
        lengths = _of_iterations(config, train_iters, samples_after or of_constant_size)
    else:
        assert train_samples is not None
        lengths = _of_samples(config, train_samples)
    lengths.check()
    rate = LearningRateSchedule(
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        warmup_steps=lengths.warmup,
        decay_steps=lengths.decay,
        style=config.lr_decay_style,
        wsd_decay_steps=lengths.wsd,
        wsd_style=config.lr_wsd_decay_style,
    )
    constant = config.weight_decay
    start, end = config.start_weight_decay, config.end_weight_decay
    decay = WeightDecaySchedule(
        start=constant if start is None else start,
        end=constant if end is None else end,
        steps=lengths.run,
        style=config.weight_decay_incr_style,
    )
    return OptimizerSchedule(rate, decay, _decoupled(config, rate))


def _decoupled(config: OptimizerConfig, rate: LearningRateSchedule) -> LearningRateSchedule | None:
    if config.decoupled_lr is None:
        return None
    least = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return replace(rate, max_lr=config.decoupled_lr, min_lr=least)


def _of_iterations(
    config: OptimizerConfig, train_iters: int, samples_after: SamplesAfter
) -> _Lengths:
    for name in ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"):
        if getattr(config, name):
            raise ConfigError(
                f"{flag(name)} goes with --train-samples; a run of --train-iters takes "
                f"{flag(name.replace('samples', 'iters'))}"
            )
    decay_iters = config.lr_decay_iters or train_iters
    decay = samples_after(decay_iters)
    fraction = config.lr_warmup_fraction
    wsd_iters = config.lr_wsd_decay_iters or 0
    before_wsd = samples_after(max(0, decay_iters - wsd_iters))
    return _Lengths(
        decay=decay,
        warmup=samples_after(config.lr_warmup_iters) if fraction is None else fraction * decay,
        wsd=decay - before_wsd if wsd_iters <= decay_iters else samples_after(wsd_iters),
        run=samples_after(train_iters),
        decay_option=f"--lr-decay-iters {decay_iters}",
        warmup_option=_warmup_option(config, "lr_warmup_iters"),
        wsd_option=f"--lr-wsd-decay-iters {config.lr_wsd_decay_iters}",
    )


def _of_samples(config: OptimizerConfig, train_samples: int) -> _Lengths:
    for name in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
        if getattr(config, name):
            raise ConfigError(
                f"{flag(name)} goes with --train-iters; a run of --train-samples takes "
                f"{flag(name.replace('iters', 'samples'))}"
            )
    decay = config.lr_decay_samples or train_samples
    fraction = config.lr_warmup_fraction
    return _Lengths(
        decay=decay,
        warmup=config.lr_warmup_samples if fraction is None else fraction * decay,
        wsd=config.lr_wsd_decay_samples or 0,
        run=train_samples,
        decay_option=f"--lr-decay-samples {decay}",
        warmup_option=_warmup_option(config, "lr_warmup_samples"),
        wsd_option=f"--lr-wsd-decay-samples {config.lr_wsd_decay_samples}",
    )


def _warmup_option(config: OptimizerConfig, name: str) -> str:
    if config.lr_warmup_fraction is not None:
        return f"--lr-warmup-fraction {config.lr_warmup_fraction}"
    return f"{flag(name)} {getattr(config, name)}"
