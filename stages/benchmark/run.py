"""Runs the benchmark that the options name: of batches, or under a load of requests."""

from __future__ import annotations

from typing import Any

from stages.benchmark.config import BenchmarkConfig
from stages.runtime.context import StageRun


def run(config: BenchmarkConfig, stage: StageRun) -> dict[str, Any]:
    """Measure and print; with --output-dir, write the documents and their page."""
    if config.is_load_test:
        from stages.benchmark import load_test

        return load_test.run(config, stage)
    from stages.benchmark import static

    return static.run(config, stage)
