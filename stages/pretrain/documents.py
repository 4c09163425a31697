"""What a run says of itself: in the documents of a checkpoint, and in the metrics of its
manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stages.pretrain.config import PretrainConfig
from trainyard.artifacts.inputs import Input
from trainyard.config import digest_relevant, to_dict
from trainyard.optim.schedule import Schedule
from trainyard.training.batch_size import BatchSize


def config_document(
    config: PretrainConfig, inputs: Mapping[str, Input], vocab_size: int, padded_vocab_size: int
) -> dict[str, Any]:
    """`config.json` of a checkpoint: all that a tool needs to build the model again.

    Without paths, so that it is the same wherever the run lies; inputs are told by digest."""
    return {
        "model": to_dict(config.model),
        "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "run": digest_relevant(config),
        "inputs": {name: found.digest for name, found in inputs.items()},
    }


def state_facts(
    config: PretrainConfig, batch_size: BatchSize, schedule: Schedule
) -> dict[str, Any]:
    """What `state.json` says of the run beside how far it is."""
    return {
        "seed": config.training.seed,
        "global_batch_size": batch_size.global_batch_size,
        "seq_length": config.model.seq_length,
        "schedule": {
            "learning_rate": asdict(schedule.learning_rate),
            "weight_decay": asdict(schedule.weight_decay),
        },
        "rng": {"kind": "seeded for every micro-batch from seed, step and its place in the batch"},
    }


def losses_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last losses of the whole run."""
    trained = [line for line in lines if "lm_loss" in line]
    measured = [line["validation_loss"] for line in lines if "validation_loss" in line]
    metrics: dict[str, Any] = {}
    if trained:
        metrics["steps"] = trained[-1]["step"]
        metrics["tokens"] = trained[-1]["tokens"]
        metrics["lm_loss"] = trained[-1]["lm_loss"]
    if measured:
        metrics["validation_loss_first"], metrics["validation_loss"] = measured[0], measured[-1]
    return metrics
