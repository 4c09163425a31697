"""What a run says of itself: in the documents of a checkpoint, and in the metrics of its
manifest."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import SaveReport
from trainyard.config import digest_relevant
from trainyard.optim.schedule import Schedule
from trainyard.optim.schedule_resume import schedule_document
from trainyard.training.options.pretrain import PretrainConfig


def config_document(
    config: PretrainConfig,
    input_digests: Mapping[str, str],
    vocab_size: int,
    padded_vocab_size: int,
    provided: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`config.json` of a checkpoint: all that a tool needs to build the model again.

    Without paths, so that it is the same wherever the run lies; inputs are told by digest.
    provided: names of what a program brought along, such as the model."""
    document: dict[str, Any] = {
        "model": digest_relevant(config.model),
        "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size,
        # The size of a micro-batch makes no other run, but who asks for a row needs it.
        "run": digest_relevant(config) | {"micro_batch_size": config.training.micro_batch_size},
        "inputs": dict(input_digests),
    }
    return document | ({"provided": dict(provided)} if provided else {})


def state_facts(
    config: PretrainConfig, global_batch_size: int, schedule: Schedule
) -> dict[str, Any]:
    """What `state.json` says of the run beside how far it is."""
    return {
        "seed": config.training.seed,
        "global_batch_size": global_batch_size,
        "seq_length": config.model.seq_length,
        "schedule": schedule_document(schedule),
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
    if lines and "test_loss" in lines[-1]:
        metrics["test_loss"] = lines[-1]["test_loss"]
    return metrics


SAVES = "saves.jsonl"

PREFIX = "saves-"
"""Begins the names of the files in a work folder, one for each save: threads write them."""


def keep_save(work_url: str, report: SaveReport) -> None:
    """Leave what a save cost in a work folder, until the run is finished."""
    name = f"{PREFIX}{report.step:07d}-{report.kind}.jsonl"
    store.write_bytes(join(work_url, name), (json.dumps(report.document()) + "\n").encode())


def kept_saves(work_url: str) -> bytes:
    """The lines of all saves, in the order of their steps."""
    names = [name for name in store.list_folder(work_url) if name.startswith(PREFIX)]
    return b"".join(store.read_bytes(join(work_url, name)) for name in sorted(names))


def saves_summary(reports: Sequence[SaveReport]) -> dict[str, Any]:
    """Figures for the manifest of a run: medians over the saves of this process."""
    if not reports:
        return {}
    return {
        "saves": len(reports),
        "save_bytes": max(report.bytes for report in reports),
        "save_blocked_seconds": _median(report.blocked_seconds for report in reports),
        "save_durable_after_seconds": _median(report.durable_seconds for report in reports),
        "save_gigabytes_per_second": _median(report.gigabytes_per_second for report in reports),
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)
