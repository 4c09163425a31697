"""Checks the checkpoint of --load before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.stored_step import StoredStep, check_step
from trainyard.conversion.detect import detect
from trainyard.models.expected import check_expected


def check_model_to_load(url: str, expect: Sequence[str], *, with_tokenizer: bool = True) -> None:
    """Refuse a step whose documents, tokenizer or weights differ from its manifest, or whose model
    is not the expected one (`check_expected`). Readers check the folders of other programs.

    with_tokenizer: the step must have one. Raises ArtifactError or ConfigError."""
    if detect(url) not in ("trainyard", None):
        return

    def check(step: StoredStep[Any]) -> None:
        if with_tokenizer:
            step.require_tokenizer()
        if expect:
            check_expected(expect, model_config(step)[0], f"--load {url}")

    check_step(url, "--load", also=check)
