"""Evaluates a checkpoint; prints the lines of Megatron-LM and writes results with passports."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import Any

from stages.evaluate.config import EvaluateConfig
from stages.runtime.context import StageRun
from trainyard.artifacts.digest import SHORT
from trainyard.artifacts.inputs import resolve
from trainyard.checkpoint.model import SCORERS
from trainyard.evaluation.contamination_report import Contamination
from trainyard.evaluation.examples import Examples
from trainyard.evaluation.metrics import Row, Summary
from trainyard.evaluation.passport import FORMAT_VERSION, RESULTS, rows_name, set_names
from trainyard.evaluation.passport import tokenizer_digest as digest_of
from trainyard.evaluation.ranks import evaluation_ranks
from trainyard.evaluation.scoring import Scorer
from trainyard.evaluation.tasks import TASKS, NoUnits, Subject, Units, score_all
from trainyard.inference.load import ModelOnRanks, load_on_ranks
from trainyard.progress import Progress
from trainyard.version import VERSION

log = logging.getLogger(__name__)


def run(config: EvaluateConfig, stage: StageRun) -> dict[str, Any]:
    """Score every data set, print its line; with --output-dir, write results.json and the rows of
    each. Returns the numbers; of several data sets, each under NAME/."""
    with evaluation_ranks(config.layout, config.device) as (groups, device):
        loaded = load_on_ranks(
            config.load,
            device,
            layout=config.layout,
            groups=groups,
            families=SCORERS,
            tokenizer=config.given_tokenizer(),
            expect=config.expect,
        )
        scorer = Scorer(loaded.model, groups, config.evaluation.micro_batch_size)
        units: Units = stage.work if stage.output is not None else NoUnits()
        sets, metrics = [], {}
        contaminated = Contamination(config.contamination)
        names = set_names(config.valid_data)
        for place, (name, path) in enumerate(zip(names, config.valid_data, strict=True)):
            examples = _examples(config, scorer, loaded, path)
            progress = partial(_progress, stage, name)
            rows = score_all(examples, f"set{place}", units, groups, progress)
            if groups.rank > 0:
                continue
            summary = examples.summarize(rows)
            print(examples.line(config.evaluation.task, summary.numbers))
            prefix = f"{name}/" if len(names) > 1 else ""
            metrics.update({f"{prefix}{key}": value for key, value in summary.numbers.items()})
            passport = _passport(config, stage, loaded, path, examples, summary, rows)
            if config.contamination.contamination_corpus:
                found = contaminated.of(name, examples, loaded.tokenizer, rows, summary)
                passport["contamination"] = found
            document = {"name": name, "rows": rows_name(place), **summary.numbers}
            sets.append({**document, "passport": passport})
            if stage.output is not None:
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                stage.write_text(rows_name(place), "".join(lines))
    if groups.rank == 0 and stage.output is not None:
        if config.contamination.contamination_documents:
            stage.write_text("contamination.jsonl", contaminated.lines(), volatile=True)
        head = {"format_version": FORMAT_VERSION, "task": config.evaluation.task}
        stage.write_json(RESULTS, {**head, "step": loaded.step, "sets": sets})
    return metrics


def _examples(config: EvaluateConfig, scorer: Scorer, loaded: ModelOnRanks, path: str) -> Examples:
    """Those of a data set, as the task asks for them."""
    subject = Subject(
        scorer=scorer,
        tokenizer=loaded.tokenizer,
        path=path,
        config=config.evaluation,
        questions=config.questions,
    )
    return TASKS[config.evaluation.task](subject)


def _progress(stage: StageRun, name: str, total: int, unit: str, done: int) -> Progress:
    return stage.progress(total, unit, name, start=done)


def _passport(
    config: EvaluateConfig,
    stage: StageRun,
    loaded: ModelOnRanks,
    path: str,
    examples: Examples,
    summary: Summary,
    rows: list[Row],
) -> dict[str, Any]:
    """What another score must share to be compared with this one (`evaluation.passport`)."""
    protocol, tokenizer = examples.protocol, loaded.tokenizer
    return {
        "protocol": {
            "name": protocol.name,
            "digest": protocol.digest,
            "definition": dict(protocol.definition),
        },
        "data": {"digest": resolve("valid_data", [path]).digest, "examples": len(examples)},
        "checkpoint": {"digest": _digest_of_load(config, stage), "step": loaded.step},
        "tokenizer": {
            "digest": digest_of(tokenizer),
            "type": tokenizer.config.tokenizer_type,
            "vocab_size": tokenizer.vocab_size,
        },
        "code": {"version": VERSION, "digest": stage.code[:SHORT]},
        "figures": summary.documents(rows),
    }


def _digest_of_load(config: EvaluateConfig, stage: StageRun) -> str:
    found = stage.inputs.get("load")
    return (found or resolve("load", [config.load])).digest
