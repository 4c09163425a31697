"""As `resolve`, for stages.classify: the checkpoint brings model and tokenizer, and --epochs the
number of steps. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stages.pretrain import resolve
from stages.pretrain.checkpoint_options import of_checkpoint
from stages.pretrain.classify_config import ClassifyConfig
from trainyard.artifacts import store
from trainyard.artifacts.urls import has_glob
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)


def beneath(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(options that those given override, remarks): a BERT, and what the command line does not say
    of its model and tokenizer, from the checkpoint of --load."""
    found, remarks = resolve.beneath(given)
    load = given.get("load")
    below: dict[str, Any] = {"model_type": "bert", **found}
    if isinstance(load, str) and load:
        below["finetune"] = True
        if "num_layers" not in given:
            below |= of_checkpoint(load, given)
    if given.get("skip_train"):
        below["train_iters"] = 1
    return {name: value for name, value in below.items() if name not in given}, remarks


def resolved(config: ClassifyConfig, world_size: int) -> ClassifyConfig:
    """The options of a run on this many ranks: --epochs as steps, a checkpoint and a validation at
    the end of each. Where a data set is missing, they stay: the inputs are checked later."""
    if config.skip_train:
        whole = replace(config.training, eval_iters=max(config.training.eval_iters, 1))
        return replace(config, training=whole, load=config.load or config.save, save=None)
    training, data = config.training, config.classification
    if training.epochs is None:
        raise ConfigError("--epochs is required: how often to pass over --train-data")
    if not all(
        has_glob(url) or store.exists(url) or store.list_folder(url) for url in data.train_data
    ):
        return config
    from trainyard.datasets.classification.samples import read_examples
    from trainyard.parallel.dims import dims_of

    dims = dims_of(config.parallel, max(world_size, config.parallel.model_ranks))
    batch = training.global_batch_size or training.micro_batch_size * dims.dp
    count = sum(len(read_examples(url, data.task)) for url in data.train_data)
    steps = -(-count // batch) if data.keep_last else count // batch
    if not steps:
        raise ConfigError(
            f"--train-data has {count} examples, fewer than the {batch} of a batch; lower "
            "--micro-batch-size or --global-batch-size, or give --keep-last"
        )
    log.info("--epochs %d: %d examples in %d steps each", training.epochs, count, steps)
    for name in ("save_interval", "eval_interval"):
        log.info("--%s: %d, the end of an epoch", name.replace("_", "-"), steps)
    planned = replace(
        training,
        epochs=None,
        train_iters=training.epochs * steps,
        eval_interval=steps,
        save_interval=steps,
        eval_iters=max(training.eval_iters, 1),
    )
    return replace(config, training=planned)
