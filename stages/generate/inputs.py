"""Checks the checkpoint before torch is imported."""

from __future__ import annotations

from typing import Any

from stages.generate.config import GenerateConfig
from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.stored_step import StoredStep, check_step
from trainyard.conversion.detect import detect
from trainyard.models.expected import check_expected


def check_inputs(config: GenerateConfig) -> None:
    """Refuse a step whose documents, tokenizer or weights differ from its manifest, or whose model
    is not the expected one. Folders of other programs are checked when they are read."""
    if detect(config.load) not in ("trainyard", None):
        return

    def check(step: StoredStep[Any]) -> None:
        step.require_tokenizer()
        if config.expect:
            check_expected(config.expect, model_config(step)[0], f"--load {config.load}")

    check_step(config.load, "--load", also=check)
