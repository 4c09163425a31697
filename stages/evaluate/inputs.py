"""Checks the checkpoint before torch is imported."""

from __future__ import annotations

from stages.evaluate.config import EvaluateConfig
from trainyard.artifacts import store
from trainyard.conversion.loadable_model import check_model_to_load
from trainyard.corpus.virtual import files_of
from trainyard.errors import DataError
from trainyard.tokenizers.registry import check_files


def check_inputs(config: EvaluateConfig) -> None:
    """Refuse a step whose documents, tokenizer or weights differ from its manifest, or whose model
    is not the expected one, and a corpus that is no token files. Readers check the checkpoints of
    other programs."""
    for prefix in config.contamination.contamination_corpus:
        missing = [url for url in files_of(prefix).values() if not store.exists(url)]
        if missing:
            raise DataError(
                f"--contamination-corpus {prefix}: there is no {missing[0]}; name the "
                "prefix of token files, which is their path without .bin and .idx"
            )
    tokenizer = config.given_tokenizer()
    if tokenizer is not None:
        check_files(tokenizer)
    check_model_to_load(
        config.load, config.expect, config.layout.parallel(), with_tokenizer=tokenizer is None
    )
