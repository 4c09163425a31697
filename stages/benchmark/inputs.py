"""Checks the checkpoint before torch is imported."""

from __future__ import annotations

from stages.benchmark.config import BenchmarkConfig
from trainyard.conversion.loadable_model import check_model_to_load


def check_inputs(config: BenchmarkConfig) -> None:
    """Refuse a damaged checkpoint, one without a tokenizer, and a model that is not expected."""
    if config.load is not None:
        check_model_to_load(config.load, config.expect, config.layout.parallel())
