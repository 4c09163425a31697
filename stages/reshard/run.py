"""Stream the tensors of one checkpoint into other files."""

from __future__ import annotations

import logging
from typing import Any

from stages.context import StageRun
from stages.reshard.config import SPLIT, ReshardConfig
from stages.reshard.savers import SAVERS, copy_step
from trainyard.checkpoint.foreign.carried import Carried, carried
from trainyard.checkpoint.foreign.loaders import Given, loader_for, open_source
from trainyard.checkpoint.foreign.source import Source
from trainyard.checkpoint.foreign.vocabulary import Adjusted
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig

log = logging.getLogger(__name__)


def run(config: ReshardConfig, stage: StageRun) -> dict[str, Any]:
    """Write the checkpoint in the format of `--saver`."""
    loader = loader_for(config.load_dir, config.loader)
    if config.saver == "trainyard":
        _say_that_none_is_needed(config)
    if loader == config.saver == "trainyard":
        _refuse_changes(config)
        metrics = copy_step(config, stage)
    else:
        with _opened(config, loader) as source:
            SAVERS[config.saver](config, stage, source, loader)
            metrics = {"step": source.step, "tensors": len(source.specs)}
    written = [record for record in stage.records.values() if not record.volatile]
    metrics |= {"files": len(written), "bytes": sum(record.size_bytes for record in written)}
    log.info("resharded %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics


def _say_that_none_is_needed(config: ReshardConfig) -> None:
    if config.target_tensor_parallel_size or config.target_pipeline_parallel_size:
        log.info(
            "a checkpoint of ours loads at any layout of ranks as it is: the target sizes only "
            "choose the number of files, %d of each kind",
            config.shards,
        )


def _opened(config: ReshardConfig, loader: str) -> Source:
    """What is read, with the vocabulary that was asked for."""
    tokenizer = _tokenizer(config)
    source = open_source(config.load_dir, loader, Given(config.num_attention_heads))
    # What pads for the ranks of Megatron-LM knows itself how.
    divisible_by = None if config.saver in SPLIT else config.make_vocab_size_divisible_by
    if tokenizer is None and config.true_vocab_size is None and divisible_by is None:
        return source
    try:
        return Adjusted(
            source,
            tokenizer=tokenizer,
            true_vocab_size=config.true_vocab_size,
            divisible_by=divisible_by,
            tensor_parallel_size=config.tensor_parallel_size,
        )
    except BaseException:
        source.close()
        raise


def _tokenizer(config: ReshardConfig) -> Carried | None:
    """The one that the options describe."""
    if config.tokenizer_type is None and config.tokenizer_model is None:
        return None
    options = {
        "tokenizer_type": config.tokenizer_type or "HuggingFaceTokenizer",
        "tokenizer_model": config.tokenizer_model,
        "vocab_file": config.vocab_file,
        "merge_file": config.merge_file,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return carried(from_dict(TokenizerConfig, given))


def _refuse_changes(config: ReshardConfig) -> None:
    """Ours into ours is a copy, bit for bit."""
    changes = {
        "--make-vocab-size-divisible-by": config.make_vocab_size_divisible_by,
        "--true-vocab-size": config.true_vocab_size,
        "--tokenizer-type": config.tokenizer_type,
        "--tokenizer-model": config.tokenizer_model,
    }
    given = [option for option, value in changes.items() if value is not None]
    if given:
        raise ConfigError(
            f"{' and '.join(given)}: a checkpoint of ours is rewritten as it is, and carries its "
            "tokenizer; these are for formats of others"
        )
