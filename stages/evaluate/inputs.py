"""Checks the checkpoint before torch is imported."""

from __future__ import annotations

from typing import Any

from stages.evaluate.config import EvaluateConfig
from trainyard.artifacts import store
from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.stored_step import StoredStep, check_step
from trainyard.conversion.detect import detect
from trainyard.corpus.pairs import PAIR
from trainyard.errors import DataError
from trainyard.models.expected import check_expected
from trainyard.tokenizers.registry import check_files


def check_inputs(config: EvaluateConfig) -> None:
    """Refuse a step whose documents, tokenizer or weights differ from its manifest, or whose model
    is not the expected one, and a corpus that is no token files. Readers check the checkpoints of
    other programs."""
    for prefix in config.contamination.contamination_corpus:
        missing = [ending for ending in PAIR if not store.exists(prefix + ending)]
        if missing:
            raise DataError(
                f"--contamination-corpus {prefix}: there is no {prefix}{missing[0]}; name the "
                "prefix of token files, which is their path without .bin and .idx"
            )
    tokenizer = config.given_tokenizer()
    if tokenizer is not None:
        check_files(tokenizer)

    def check(step: StoredStep[Any]) -> None:
        if tokenizer is None:
            step.require_tokenizer()
        if config.expect:
            check_expected(config.expect, model_config(step)[0], f"--load {config.load}")

    if detect(config.load) in ("trainyard", None):
        check_step(config.load, "--load", also=check)
