"""What `stages.classify` adds to a training: the parts of a classifier, and its results."""

from __future__ import annotations

import json
from typing import Any

from stages.pretrain.classify_config import ClassifyConfig
from stages.runtime.context import StageRun
from trainyard.artifacts.digest import SHORT
from trainyard.artifacts.inputs import resolve
from trainyard.checkpoint.steps import locate_step
from trainyard.evaluation.examples import ProtocolId
from trainyard.evaluation.passport import FORMAT_VERSION, RESULTS, rows_name, tokenizer_digest
from trainyard.evaluation.tasks import NoUnits
from trainyard.parallel.groups import ProcessGroups
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.training.classification.accuracy import (
    EpochAccuracy,
    accuracy_of,
    best_step,
    summarize,
)
from trainyard.training.classification.parts import ClassificationParts
from trainyard.training.overrides import Overrides
from trainyard.version import VERSION


def classifier_overrides(
    config: ClassifyConfig, stage: StageRun, groups: ProcessGroups, device: Any
) -> tuple[Overrides, EpochAccuracy]:
    """The parts that replace those of a training, and the callback that measures."""
    parts = ClassificationParts(config, config.classification, build_tokenizer(config.tokenizer))
    return parts.overrides(groups, device, NoUnits() if config.save is None else stage.work)


def classifier_metrics(accuracy: EpochAccuracy) -> dict[str, Any]:
    """The accuracy of the last epoch on each data set and over all, and the best step."""
    last, best = accuracy.epochs[max(accuracy.epochs)], best_step(accuracy.epochs)
    each = {f"accuracy/{name}": accuracy_of({name: rows}) for name, rows in last.items()}
    return {
        **each,
        "accuracy": accuracy_of(last),
        "best_step": best,
        "best_accuracy": accuracy_of(accuracy.epochs[best]),
    }


def write_results(config: ClassifyConfig, stage: StageRun, accuracy: EpochAccuracy) -> None:
    """results.json and the rows of the last step, in the run folder."""
    assert config.save is not None
    step = max(accuracy.epochs)
    _, manifest = locate_step(config.save, "--save")
    tokenizer, data = build_tokenizer(config.tokenizer), config.classification
    protocol = ProtocolId(data.task, {"version": 1, "length": config.model.seq_length})
    sets = []
    measured = zip(data.valid_data, accuracy.epochs[step].items(), strict=True)
    for place, (path, (name, rows)) in enumerate(measured):
        summary = summarize(rows)
        passport = {
            "protocol": {
                "name": protocol.name,
                "digest": protocol.digest,
                "definition": dict(protocol.definition),
            },
            "data": {"digest": resolve("valid_data", [path]).digest, "examples": len(rows)},
            "checkpoint": {"digest": manifest.output_digest, "step": step},
            "tokenizer": {
                "digest": tokenizer_digest(tokenizer),
                "type": tokenizer.config.tokenizer_type,
                "vocab_size": tokenizer.vocab_size,
            },
            "code": {"version": VERSION, "digest": stage.code[:SHORT]},
            "figures": summary.documents(rows),
        }
        document = {"name": name, "rows": rows_name(place), **summary.numbers}
        sets.append({**document, "passport": passport})
        stage.write_text(rows_name(place), "".join(json.dumps(row) + "\n" for row in rows))
    head = {"format_version": FORMAT_VERSION, "task": data.task, "step": step}
    stage.write_json(RESULTS, {**head, "sets": sets})
