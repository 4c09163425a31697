"""Run a stage's work in this process, without its command line: for tests of what it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from stages.context import StageRun
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import resolve
from trainyard.config import digest_relevant, from_dict


def run_directly(
    config_class: type, run: Callable[[Any, StageRun], dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """The metrics of `run`; options are flat keys. What a failed run keeps for a next one stays."""
    config = from_dict(config_class, options)
    inputs = {name: resolve(name, urls) for name, urls in config.inputs().items() if urls}
    known = [digest_relevant(config), {name: i.digest for name, i in inputs.items()}]
    stage = StageRun("test", inputs, config.output(), digest_document(known))
    with contextlib.closing(stage):
        metrics = run(config, stage)
        stage.work.remove()
        return metrics
