"""Checks the checkpoint before torch is imported."""

from __future__ import annotations

from stages.evaluate.config import EvaluateConfig
from trainyard.checkpoint.stored_step import StoredStep, check_step


def check_inputs(config: EvaluateConfig) -> None:
    """Refuse a step whose documents, tokenizer or weights differ from its manifest."""
    check_step(config.load, "--load", also=StoredStep.require_tokenizer)
