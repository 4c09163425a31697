"""A stage of a flow as the launch of a job: the same whether it is started or only looked at.

Pure: nothing is written, and nobody is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.backends.spec import LaunchSpec, Shares
from flows.recipes.stage_job import StageJob
from flows.stage_configs import CONFIGS
from flows.yard.profile import StageEnvironment
from trainyard.config import leaves
from trainyard.version import FLOW_REVISION, FLOW_VERSION, VERSION, build_revision

DOCUMENT = "config.toml"
"""File of a run folder with the options of the stage."""


def stage_spec(
    job: StageJob,
    place: StageEnvironment,
    folder: Path,
    key: str = "",
    shares: Shares | None = None,
) -> LaunchSpec:
    """One attempt at a job, with `folder` for its run folder; ConfigError for what cannot be."""
    return LaunchSpec(
        name=job.name,
        command=(place.python, "-m", f"stages.{job.stage}", "--config", str(folder / DOCUMENT)),
        run_directory=str(folder),
        environment={**place.environment, **_build()},
        grace_seconds=place.watch_of(job.stage).grace_seconds,
        resources=place.resources_of(job.stage),
        image=place.image_of(job.stage),
        mounts=place.mounts,
        key=key,
        rank_launcher=(place.python, "-m", "torch.distributed.run"),
        shares=shares,
    )


def stage_document(job: StageJob, place: StageEnvironment) -> dict[str, Any]:
    """The options as the job finds them in its document.

    A stage that is given GPUs is told to compute on them, unless its device was written: where an
    image or a node has no CUDA it then ends in words, and does not train on CPUs for a month."""
    given = {name: value for name, value in job.document.items() if value is not None}
    takes_device = any(name == "device" for name, _, _ in leaves(CONFIGS[job.stage]))
    if takes_device and place.resources_of(job.stage).gpus_per_node:
        given.setdefault("device", "cuda")
    return given


def _build() -> dict[str, str]:
    """What a stage compares with itself (stages/runtime/cli.py)."""
    told = {FLOW_VERSION: VERSION, FLOW_REVISION: build_revision()}
    return {name: value for name, value in told.items() if value}
