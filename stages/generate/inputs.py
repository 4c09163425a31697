"""Checks the checkpoint before torch is imported."""

from __future__ import annotations

from stages.generate.config import GenerateConfig
from trainyard.conversion.loadable_model import check_model_to_load


def check_inputs(config: GenerateConfig) -> None:
    """Refuse a damaged checkpoint, one without a tokenizer, and a model that is not expected."""
    check_model_to_load(config.load, config.expect, config.layout.parallel())
