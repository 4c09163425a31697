"""Documents of a run: config.json and state.json of a checkpoint, the metrics of its manifest, and
saves.jsonl, which has the cost of each save of all attempts:

    {"step": 500, "bytes": 1241513984, "blocked_seconds": 0.31, "durable_seconds": 4.2,
     "kind": "durable", "gigabytes_per_second": 0.2956}

`kind` is durable in the run folder, local or global for non-persistent saves, upload for a copy
from nodes to the run folder. Both times count from the start of the save: until training continues,
and until the manifest is written. saves.jsonl is no part of the result of a run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import SaveReport
from trainyard.config import digest_relevant
from trainyard.optim.schedule import OptimizerSchedule
from trainyard.optim.schedule_resume import optimizer_schedule_document
from trainyard.training.options.pretrain import PretrainConfig


def config_document(
    config: PretrainConfig,
    input_digests: Mapping[str, str],
    vocab_size: int,
    padded_vocab_size: int,
    provided: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`config.json` of a checkpoint: all that a tool needs to rebuild the model.

    Inputs have digests and no paths, so that the document does not depend on the location of the
    run. provided: names of the overrides of a program, such as the model."""
    document: dict[str, Any] = {
        "model": digest_relevant(config.model),
        "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size,
        # Not part of the lineage, but needed to locate a sample in its micro-batch.
        "run": digest_relevant(config) | {"micro_batch_size": config.training.micro_batch_size},
        "inputs": dict(input_digests),
    }
    return document | ({"provided": dict(provided)} if provided else {})


def state_facts(
    config: PretrainConfig, global_batch_size: int, optimizer_schedule: OptimizerSchedule
) -> dict[str, Any]:
    """The entries of `state.json` besides the position of the run."""
    return {
        "seed": config.training.seed,
        "global_batch_size": global_batch_size,
        "seq_length": config.model.seq_length,
        "schedule": optimizer_schedule_document(optimizer_schedule),
        "rng": {"kind": "seeded for every micro-batch from seed, step and its place in the batch"},
    }


def losses_of(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """First and last losses of the whole run."""
    metrics: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    line: dict[str, Any] = {}
    for line in lines:
        if "lm_loss" in line:
            metrics = {"steps": line["step"], "tokens": line["tokens"], "lm_loss": line["lm_loss"]}
        if "validation_loss" in line:
            measured.setdefault("validation_loss_first", line["validation_loss"])
            measured["validation_loss"] = line["validation_loss"]
    last = {"test_loss": line["test_loss"]} if "test_loss" in line else {}
    return metrics | measured | last


SAVES = "saves.jsonl"

PREFIX = "saves-"
"""Prefix of the files in a work folder, one for each save, as several threads write them."""


def keep_save(work_url: str, report: SaveReport) -> None:
    """Keep the cost of a save in a work folder, until the run is finished."""
    name = f"{PREFIX}{report.step:07d}-{report.kind}.jsonl"
    store.write_bytes(join(work_url, name), (json.dumps(report.document()) + "\n").encode())


def kept_files(work_url: str, prefix: str) -> list[str]:
    """The files of a work folder whose names begin so, in the order of their steps."""
    names = [name for name in store.list_folder(work_url) if name.startswith(prefix)]
    return [join(work_url, name) for name in sorted(names)]


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
