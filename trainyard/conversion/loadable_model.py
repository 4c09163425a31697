"""Checks the checkpoint of --load before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.stored_step import StoredStep, check_step
from trainyard.conversion.detect import detect
from trainyard.models.expected import check_expected
from trainyard.models.layout_fit import check_layout_fits
from trainyard.parallel.config import ParallelConfig


def check_model_to_load(
    url: str, expect: Sequence[str], parallel: ParallelConfig, *, with_tokenizer: bool = True
) -> None:
    """Refuse a step whose documents, tokenizer or weights differ from its manifest, whose model is
    not the expected one (`check_expected`), or does not fit the layout. Readers check the folders
    of other programs.

    with_tokenizer: the step must have one. Raises ArtifactError or ConfigError."""
    if detect(url) not in ("trainyard", None):
        return

    def check(step: StoredStep[Any]) -> None:
        if with_tokenizer:
            step.require_tokenizer()
        config, _ = model_config(step)
        check_expected(expect, config, f"--load {url}")
        check_layout_fits(parallel, config)

    check_step(url, "--load", also=check)
