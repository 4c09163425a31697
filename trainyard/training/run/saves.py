"""What the saves of a run cost: saves.jsonl in its folder, and a few figures of them. Never part of
what a run makes.

    {"step": 500, "bytes": 1241513984, "blocked_seconds": 0.31, "durable_seconds": 4.2,
     "kind": "durable", "gigabytes_per_second": 0.2956}

A line a save, of all attempts at the run: `kind` durable in the run folder, local or global in
another place, upload for one that was copied from nodes to the run folder. Seconds count from when
training came to the save: until it went on, until the manifest stood."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.background import SaveReport

FILE = "saves.jsonl"

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
