"""Checks the checkpoint before torch is imported."""

from __future__ import annotations

from stages.parity.config import ParityConfig
from trainyard.conversion.loadable_model import check_model_to_load


def check_inputs(config: ParityConfig) -> None:
    """Refuse a damaged checkpoint, one without a tokenizer, and a model that is not expected."""
    check_model_to_load(config.load, config.expect, config.layout.parallel())
