"""Inputs that cannot be, refused before ranks are started and torch is loaded."""

from __future__ import annotations

from stages.pretrain.config import PretrainConfig
from trainyard.checkpoint.steps import published_steps
from trainyard.checkpoint.stored_step import check_step
from trainyard.conversion.detect import detect
from trainyard.datasets.config import SPLIT_NAMES
from trainyard.datasets.splits import check_splits
from trainyard.tokenizers.registry import check_files


def check_inputs(config: PretrainConfig) -> None:
    """Refuse token files that are damaged or too short for a split, and a tokenizer or a checkpoint
    to load of which something is missing."""
    check_files(config.tokenizer)
    if config.ckpt_convert_format is not None:
        assert config.load is not None
        if detect(config.load) in ("trainyard", None):
            check_step(config.load, "--load")
        return
    splits = SPLIT_NAMES if config.training.eval_iters else SPLIT_NAMES[:1]
    check_splits(config.data, config.model.seq_length, splits)
    load = config.foreign_load()
    if load is not None and not _may_go_on(config):
        check_step(load, "--load", config.verify_checkpoint)


def _may_go_on(config: PretrainConfig) -> bool:
    """Whether the run may have steps of its own, which come before those of --load."""
    has_others = config.non_persistent.non_persistent_save_interval is not None
    return has_others or bool(published_steps(config.save))
