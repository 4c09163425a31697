"""Plans the steps that build Retro's neighbours: a table, or a JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from stages.plan.retro_config import RetroPlanConfig
from stages.plan.retro_sample import read_measured
from stages.plan.retro_steps import RetroPlan, Step, Target, default_training, plan_retro
from stages.runtime.context import StageRun
from trainyard.charts.text_table import text_table

FORMAT_VERSION = 1


def run(config: RetroPlanConfig, stage: StageRun) -> dict[str, Any]:
    """Print the plan; with --output-dir, write retro_plan.json."""
    measured = read_measured(config.retro_measured)
    target = Target(
        chunks=config.retro_chunks,
        query_chunks=config.retro_query_chunks or config.retro_chunks,
        training=min(
            config.retro_index_ntrain or default_training(config.retro_chunks), config.retro_chunks
        ),
        hours=config.hours,
        node_memory_gb=config.node_memory_gb,
    )
    found = plan_retro(target, measured)
    written = document(target, found)
    print(json.dumps(written, indent=1) if config.json else report(target, found))
    if stage.output is not None:
        stage.write_json("retro_plan.json", written)
    return {"seconds": sum(step.seconds for step in found.steps)}


def document(target: Target, found: RetroPlan) -> dict[str, Any]:
    """JSON-able."""
    return {"format_version": FORMAT_VERSION, "target": asdict(target), **asdict(found)}


def report(target: Target, found: RetroPlan) -> str:
    """The plan as text."""
    head = ("step", "one node", "nodes", "time", "memory", "disk")
    disk = sum(step.disk_gb for step in found.steps)
    return "\n".join(
        [
            f"{target.chunks:,} chunks, {target.query_chunks:,} chunks of samples",
            f"Index: {found.index_str} ({found.reason}), trained on {target.training:,} chunks; "
            f"a query searches {found.nprobe:,} lists",
            "",
            *text_table([head, *map(_row, found.steps)]),
            "",
            f"Disk in all: {_size(disk)}. Times are those of nodes like the measured one. The "
            "lists searched grow as the root of their number, from those of the sample; the recall "
            "that faiss_add measures decides.",
            *(f"{step.name}: {step.note}" for step in found.steps if step.note),
        ]
    )


def _row(step: Step) -> tuple[str, ...]:
    return (
        step.name,
        _time(step.seconds),
        str(step.nodes),
        _time(step.seconds_on_nodes),
        _size(step.memory_gb),
        _size(step.disk_gb),
    )


def _size(gigabytes: float) -> str:
    return f"{gigabytes:,.1f} GB" if gigabytes >= 1 else f"{1e3 * gigabytes:,.0f} MB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
