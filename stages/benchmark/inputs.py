"""A checkpoint that cannot be loaded, refused before torch is."""

from __future__ import annotations

from stages.benchmark.config import BenchmarkConfig
from trainyard.checkpoint.stored_step import StoredStep, check_step


def check_inputs(config: BenchmarkConfig) -> None:
    """Refuse a step whose documents, tokenizer or weights are not those of its manifest."""
    check_step(config.load, "--load", also=StoredStep.require_tokenizer)
