"""Checks of the inputs before ranks start and torch is loaded."""

from __future__ import annotations

from stages.pretrain.config import PretrainConfig
from trainyard.checkpoint.steps import published_steps
from trainyard.checkpoint.stored_step import check_step
from trainyard.conversion.detect import detect
from trainyard.datasets.config import SPLIT_NAMES
from trainyard.datasets.splits import check_instructions, check_splits
from trainyard.models.families import family_of
from trainyard.tokenizers.registry import check_files


def check_inputs(config: PretrainConfig) -> None:
    """Refuse token files that are damaged or too short for a split, instruction data without a
    record for one, and an incomplete tokenizer or checkpoint of --load."""
    check_files(config.tokenizer)
    if config.ckpt_convert_format is not None:
        assert config.load is not None
        if detect(config.load) in ("trainyard", None):
            check_step(config.load, "--load")
        return
    splits = SPLIT_NAMES if config.training.eval_iters else SPLIT_NAMES[:1]
    family = family_of(config.model)
    if config.sft.sft:
        check_instructions(config.data, splits)
    else:
        check_splits(config.data, None if family.of_sentences else config.model.seq_length, splits)
    if family.neighbor_shape is not None and not config.sft.sft:
        # Imported here: other families do without HDF5.
        from trainyard.retrieval.run_neighbors import check_tables

        shape = family.neighbor_shape(config.model)
        check_tables(config.retrieval, config.data, shape, splits)
    load = config.foreign_load()
    # A run with steps of its own, perhaps on its nodes, resumes from those and not from --load.
    has_others = config.non_persistent.non_persistent_save_interval is not None
    if load is not None and not has_others and not published_steps(config.save):
        check_step(load, "--load", config.verify_checkpoint)
