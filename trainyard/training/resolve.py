"""Options in place of others: --epochs as a length in samples or steps, --skip-train as a run that
keeps nothing. No torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, TypeVar

from trainyard.config import flag
from trainyard.datasets.epochs import samples_of_epoch
from trainyard.errors import ConfigError
from trainyard.models.families import family_of
from trainyard.optim.config import OptimizerConfig
from trainyard.training.options.pretrain import PretrainConfig

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=PretrainConfig)

IN_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


def resolved(config: Config, dp: int) -> Config:
    """The options of a run on this many data-parallel ranks."""
    if config.skip_train:
        return replace(config, load=config.load or config.save, save=None)
    return without_epochs(config, dp)


def without_epochs(config: Config, dp: int) -> Config:
    """The options with --train-samples in place of --epochs; of two lengths, the shorter.

    dp: data-parallel ranks, which decide the batch size without --global-batch-size. Parts of the
    learning rate schedule in steps become samples of the batch size."""
    training = config.training
    epochs = training.epochs
    if epochs is None:
        return config
    if family_of(config.model).of_sentences:
        raise ConfigError(
            f"--epochs {epochs}: samples of --model-type {config.model.model_type} are drawn "
            "again in every pass; give --train-samples or --train-iters"
        )
    in_epoch = samples_of_epoch(config.data, config.model.seq_length)
    samples = epochs * in_epoch
    log.info("--epochs %d: %d samples, %d in each pass", epochs, samples, in_epoch)
    batch = training.global_batch_size or training.micro_batch_size * dp
    if training.train_iters is not None:
        steps = min(training.train_iters, samples // batch)
        log.info("--epochs %d with --train-iters: the run has %d steps, the shorter", epochs, steps)
        return replace(config, training=replace(training, epochs=None, train_iters=max(steps, 1)))
    samples = min(samples, training.train_samples or samples)
    is_constant = not (training.rampup_batch_size or training.step_batch_size_schedule)
    return replace(
        config,
        training=replace(training, epochs=None, train_samples=samples),
        optimizer=_in_samples(config.optimizer, batch if is_constant else None),
    )


def _in_samples(optimizer: OptimizerConfig, batch: int | None) -> OptimizerConfig:
    """The schedule in samples. batch: samples of each step; None: they differ."""
    given = {name: steps for name in IN_STEPS if (steps := getattr(optimizer, name))}
    if given and batch is None:
        name = next(iter(given))
        raise ConfigError(
            f"{flag(name)} with --epochs and a batch size that changes: steps differ; give "
            f"{flag(name.replace('iters', 'samples'))}"
        )
    changed: dict[str, Any] = {}
    for name, steps in given.items():
        changed[name] = 0 if name == "lr_warmup_iters" else None
        changed[name.replace("iters", "samples")] = steps * (batch or 0)
    return replace(optimizer, **changed)
