"""Streams the tensors of a checkpoint into other files or another format."""

from __future__ import annotations

import gc
import logging
from typing import Any

from stages.reshard.config import ReshardConfig
from stages.reshard.steps import copy_step
from stages.runtime.context import StageRun
from trainyard.checkpoint.stored_step import StoredStep, check_step
from trainyard.conversion.detect import detect, loader_for, refuse_unfit
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

COLLECT_AFTER = 1_000_000
"""New objects until Python looks for cycles among them. After its default of 700 it looks at a plan
of a hundred thousand slices so often that it takes a third of the time."""


def run(config: ReshardConfig, stage: StageRun) -> dict[str, Any]:
    """Write the checkpoint in the format of `--saver`."""
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER)
    try:
        metrics = _written(config, stage)
    finally:
        gc.set_threshold(*thresholds)
    written = [record for record in stage.records.values() if not record.volatile]
    parts = stage.parts.values()
    files = len(written) + sum(part.num_files for part in parts)
    size = sum(file.size_bytes for file in written) + sum(part.size_bytes for part in parts)
    metrics |= {"files": files, "bytes": size}
    log.info("resharded %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics


def _written(config: ReshardConfig, stage: StageRun) -> dict[str, Any]:
    if config.saver == "trainyard":
        _log_unneeded_sizes(config)
    if _is_copy(config):
        _refuse_changes(config)
        return copy_step(config, stage)
    loader = _checked_loader(config)
    from stages.reshard.convert import convert  # imports torch, which a copy does not need

    return convert(config, stage, loader)


def _is_copy(config: ReshardConfig) -> bool:
    """Whether to copy a trainyard step. True also for a folder without a checkpoint: the reader of
    trainyard's format then reports what it found."""
    if config.upcycle_num_experts is not None:
        return False
    if config.saver != "trainyard" or config.loader not in ("auto", "trainyard"):
        return False
    if config.decoder_only:
        return False
    return config.loader == "trainyard" or detect(config.load_dir) in ("trainyard", None)


def _checked_loader(config: ReshardConfig) -> str:
    """The loader of the source, after the checks that need no torch."""
    described = config.tokenizer()
    if described is not None:
        from trainyard.tokenizers.registry import check_files  # imports numpy

        check_files(described)
    loader = loader_for(config.load_dir, config.loader)
    refuse_unfit(config.load_dir, loader)
    if loader == "trainyard":
        check_step(config.load_dir, "--load-dir", also=StoredStep.tokenizer_files)
    return loader


def _log_unneeded_sizes(config: ReshardConfig) -> None:
    if config.target_tensor_parallel_size or config.target_pipeline_parallel_size:
        log.info(
            "a trainyard checkpoint loads at any layout of ranks without resharding: the target "
            "sizes only choose the number of files, %d of each kind",
            config.shards,
        )


def _refuse_changes(config: ReshardConfig) -> None:
    """A trainyard step is copied bit for bit, so options that change it are refused."""
    changes: dict[str, object] = {
        "--make-vocab-size-divisible-by": config.make_vocab_size_divisible_by,
        "--true-vocab-size": config.true_vocab_size,
        "--tokenizer-type": config.tokenizer_type,
        "--tokenizer-model": config.tokenizer_model,
    }
    changes[f"--{config.number_format}"] = config.number_format
    given = [option for option, value in changes.items() if value is not None]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} cannot be applied: a trainyard checkpoint is copied unchanged, "
            "with its tokenizer; leave the options out, or convert from or to another format"
        )
