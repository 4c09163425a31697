"""Evaluates a checkpoint; prints the line of Megatron-LM and writes results.json."""

from __future__ import annotations

import json
import logging
from typing import Any

from stages.evaluate.config import EvaluateConfig
from stages.runtime.context import StageRun
from trainyard.checkpoint.model import SCORERS, WRITERS, load_model
from trainyard.evaluation.config import OF_QUESTIONS
from trainyard.evaluation.tasks import PREDICTIONS, TASKS, Subject
from trainyard.models.families import family_of
from trainyard.parallel.device import resolve_device

log = logging.getLogger(__name__)

FORMAT_VERSION = 1


def run(config: EvaluateConfig, stage: StageRun) -> dict[str, Any]:
    """Evaluate and print the line; with --output-dir, write results.json, and predictions.jsonl if
    the task has some."""
    task = TASKS[config.evaluation.task]
    device = str(resolve_device(config.device))
    answers = config.evaluation.task in OF_QUESTIONS
    loaded = load_model(config.load, device=device, model_type=WRITERS if answers else SCORERS)
    if family_of(loaded.config).neighbor_shape is not None:
        log.info("%s: without neighbours, so by its decoder alone", config.load)
    loaded.model.eval()
    unit = "questions" if answers else "tokens"
    results = task.run(
        Subject(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            path=config.valid_data,
            config=config.evaluation,
            questions=config.questions,
            progress_of=lambda total: stage.progress(total, unit, "evaluate"),
        )
    )
    predictions = results.pop(PREDICTIONS, None)
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
        if predictions is not None:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
            stage.write_text("predictions.jsonl", "".join(lines))
    return results
