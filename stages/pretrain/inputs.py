"""Checks of the inputs before ranks start and torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from stages.pretrain.classify_config import ClassifyConfig
from stages.pretrain.config import PretrainConfig
from trainyard.checkpoint.steps import published_steps
from trainyard.checkpoint.stored_step import check_step
from trainyard.conversion.detect import detect
from trainyard.datasets.classification.samples import read_examples
from trainyard.datasets.config import SPLIT_NAMES
from trainyard.datasets.splits import check_instructions, check_splits
from trainyard.models.families import family_of
from trainyard.tokenizers.registry import check_files
from trainyard.training.run.other_runs import refuse_other_runs


def _own_steps(config: PretrainConfig) -> list[int]:
    return [] if config.save is None else published_steps(config.save)


def check_output(config: PretrainConfig, lineage: str, input_digests: Mapping[str, str]) -> None:
    """Refuse a run folder that holds another run, unless --new-run replaces it."""
    if config.ckpt_convert_format is None:
        refuse_other_runs(config, lineage, input_digests)


def check_inputs(config: PretrainConfig) -> None:
    """Refuse token files that are damaged or too short for a split, instruction data without a
    record for one, and an incomplete tokenizer or checkpoint of --load."""
    check_files(config.tokenizer)
    if config.ckpt_convert_format is not None:
        assert config.load is not None
        if detect(config.load) in ("trainyard", None):
            check_step(config.load, "--load")
        return
    if isinstance(config, ClassifyConfig):
        _check_data_sets(config)
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
    _check_load(config)


def _check_data_sets(config: ClassifyConfig) -> None:
    """Read the data sets of a classifier; and check its checkpoint."""
    data = config.classification
    for url in (*data.train_data, *data.valid_data):
        read_examples(url, data.task)
    _check_load(config)


def _check_load(config: PretrainConfig) -> None:
    load = config.foreign_load()
    # A run with steps of its own, perhaps on its nodes, resumes from those and not from --load.
    has_others = config.non_persistent.non_persistent_save_interval is not None
    if load is None or has_others or _own_steps(config):
        return
    if detect(load) in ("trainyard", None):  # readers check those of other programs
        check_step(load, "--load", config.verify_checkpoint)
