"""Converts a checkpoint from one format into another."""

from __future__ import annotations

from typing import Any

from stages.reshard.config import MEGATRON, ReshardConfig
from stages.reshard.savers import SAVERS
from stages.runtime.context import StageRun
from trainyard.conversion.cast import Cast
from trainyard.conversion.loaders import LoadOptions, open_source
from trainyard.conversion.retro_decoder import RetroDecoder
from trainyard.conversion.source import Source
from trainyard.conversion.tokenizer_files import carried
from trainyard.conversion.upcycle import Upcycled
from trainyard.conversion.vocabulary import Adjusted


def convert(config: ReshardConfig, stage: StageRun, loader: str) -> dict[str, Any]:
    """Write a checkpoint in the format of `--saver`; returns its step and number of tensors."""
    with _cast(config, _opened(config, loader)) as source:
        SAVERS[config.saver](config, stage, source, loader)
        return {"step": source.step, "tensors": len(source.specs)}


def _cast(config: ReshardConfig, source: Source) -> Source:
    """The source, with weights of the requested number format."""
    if config.number_format is None:
        return source
    try:
        return Cast(source, config.number_format, with_states=config.saver in MEGATRON)
    except BaseException:
        source.close()
        raise


def _opened(config: ReshardConfig, loader: str) -> Source:
    """The source, with the requested vocabulary and experts."""
    source = open_source(config.load_dir, loader, LoadOptions(config.num_attention_heads))
    try:
        if config.decoder_only:
            source = RetroDecoder(source)
        return _upcycled(config, _adjusted(config, source))
    except BaseException:
        source.close()
        raise


def _adjusted(config: ReshardConfig, source: Source) -> Source:
    """With another vocabulary, if one is asked for."""
    described = config.tokenizer()
    rows = source.padded_vocab_size
    tokenizer = carried(described, rows) if described is not None else None
    # Savers of Megatron-LM's formats pad the vocabulary themselves.
    divisible_by = None if config.saver in MEGATRON else config.make_vocab_size_divisible_by
    if tokenizer is None and config.true_vocab_size is None and divisible_by is None:
        return source
    return Adjusted(
        source,
        tokenizer=tokenizer,
        true_vocab_size=config.true_vocab_size,
        divisible_by=divisible_by,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def _upcycled(config: ReshardConfig, source: Source) -> Source:
    """With experts, if --upcycle-num-experts asks for them."""
    moe = config.experts()
    return source if moe is None else Upcycled(source, moe, config.upcycle_seed)
