"""`--ckpt-convert-format`: converts the checkpoint of `--load`, in any known format, to a format of
Megatron-LM, in DIR/torch or DIR/torch_dist. No training.

As in Megatron-LM, the options of the run describe the model, the padding of its vocabulary and the
number of ranks for `torch` files; the data is not read. Only rank 0 works."""

from __future__ import annotations

import logging
from typing import Any

from stages.pretrain.config import PretrainConfig
from stages.runtime.context import Replacing, StageRun, replacing
from trainyard.conversion.detect import loader_for
from trainyard.conversion.loaders import open_source
from trainyard.conversion.megatron.folder import marks_of
from trainyard.conversion.megatron.write import write_megatron
from trainyard.conversion.same_model import check_same_model
from trainyard.conversion.source import Source
from trainyard.conversion.tokenizer_files import carried
from trainyard.conversion.vocabulary import Adjusted
from trainyard.errors import ConfigError
from trainyard.parallel.pipeline.partition import partition

log = logging.getLogger(__name__)


def convert(config: PretrainConfig, stage: StageRun) -> dict[str, Any]:
    """Write the checkpoint and return metrics. Raises ConfigError, before anything is written, if
    the options describe another model or impossible files."""
    if not stage.is_main:
        return {}
    assert config.load is not None
    assert config.ckpt_convert_format is not None
    assert stage.output is not None
    loader = loader_for(config.load)
    with open_source(config.load, loader) as source:
        check_same_model(config.model, source)
        folder = stage.output.url
        padded = _padded(config, source, loader)
        with replacing(stage, folder, marks_of(source.step)) as output:
            WRITE[config.ckpt_convert_format](config, stage, padded, output)
        log.info(
            "converted checkpoint: %s -> %s step=%d load=%s save=%s",
            *(loader, config.ckpt_convert_format, source.step, config.load, folder),
        )
        return {"step": source.step, "tensors": len(source.specs)}


def _padded(config: PretrainConfig, source: Source, loader: str) -> Adjusted:
    """The checkpoint with the vocabulary of this run."""
    tokenizer = carried(config.tokenizer)
    known = loader == "trainyard"  # other formats do not always record it
    if known and tokenizer.vocab_size != source.vocab_size:
        raise ConfigError(
            f"--load {source.url} was trained with {source.vocab_size} tokens, and the tokenizer "
            f"has {tokenizer.vocab_size}; give the one in its tokenizer/"
        )
    return Adjusted(
        source,
        tokenizer=tokenizer,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
    )


# --- the formats --------------------------------------------------------------------------------


def _write_torch(
    config: PretrainConfig, stage: StageRun, source: Source, output: Replacing
) -> None:
    """A file for each tensor and pipeline rank."""
    write_megatron(
        source,
        stage.open,
        tp=config.parallel.tensor_model_parallel_size,
        split=partition(config.parallel, config.model.num_layers),
        save_optimizer=config.training.save_optim,
        expect=output.expect,
        advance=output.advance,
    )


def _write_torch_dist(
    config: PretrainConfig, stage: StageRun, source: Source, output: Replacing
) -> None:
    """Whole tensors, for any number of ranks."""
    # torch's module for this format takes seconds to import, and no training needs it.
    from trainyard.conversion.torch_dist.write import write_torch_dist

    write_torch_dist(
        source,
        stage.open,
        tp=config.parallel.tensor_model_parallel_size,
        distributed_optimizer=config.parallel.data_parallel.use_distributed_optimizer,
        ep=config.parallel.expert_model_parallel_size,
        save_optimizer=config.training.save_optim,
        expect=output.expect,
        advance=output.advance,
    )


WRITE = {"torch": _write_torch, "torch_dist": _write_torch_dist}
