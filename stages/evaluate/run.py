"""Evaluates a checkpoint; prints the line of Megatron-LM and writes results.json."""

from __future__ import annotations

from typing import Any

from stages.evaluate.config import EvaluateConfig
from stages.runtime.context import StageRun
from trainyard.artifacts.inputs import read_checked
from trainyard.checkpoint.model import load_model
from trainyard.errors import DataError
from trainyard.evaluation.tasks import TASKS
from trainyard.parallel.device import resolve_device

FORMAT_VERSION = 1


def run(config: EvaluateConfig, stage: StageRun) -> dict[str, Any]:
    """Evaluate and print the line; with --output-dir, write results.json."""
    text = read_text(config.valid_data)
    loaded = load_model(config.load, device=str(resolve_device(config.device)), model_type="gpt")
    loaded.model.eval()
    task = TASKS[config.evaluation.task]
    results = task.run(
        loaded.model,
        loaded.tokenizer,
        text,
        config.valid_data,
        config.evaluation,
        lambda total: stage.progress(total, "tokens", "evaluate"),
    )
    print(task.line(config.evaluation.task, results))
    if stage.output is not None:
        document = {
            "format_version": FORMAT_VERSION,
            "task": config.evaluation.task,
            "step": loaded.step,
            "overlapping_eval": config.evaluation.overlapping_eval,
            **results,
        }
        stage.write_json("results.json", document)
    return results


def read_text(url: str) -> str:
    """A UTF-8 file with newlines as line ends. Raises DataError with the first byte that is not
    UTF-8."""
    data = read_checked(url)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{url}: byte {error.start} is not UTF-8; --valid-data takes a text file"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
