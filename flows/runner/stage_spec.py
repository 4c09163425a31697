"""Builds the LaunchSpec of a stage, both to start it and to check it. Pure."""

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
    site: StageEnvironment,
    folder: Path,
    key: str = "",
    shares: Shares | None = None,
    flow_run: str = "",
) -> LaunchSpec:
    """The job of one attempt, with `folder` as its run folder; ConfigError if it cannot start."""
    # The stage compares them with its own (stages/runtime/cli.py).
    versions = {FLOW_VERSION: VERSION, FLOW_REVISION: build_revision()}
    return LaunchSpec(
        name=job.name,
        command=(site.python, "-m", f"stages.{job.stage}", "--config", str(folder / DOCUMENT)),
        run_directory=str(folder),
        environment={**site.environment, **{k: v for k, v in versions.items() if v}},
        grace_seconds=site.watch_of(job.stage).grace_seconds,
        resources=site.resources_of(job.stage),
        image=site.image_of(job.stage),
        mounts=site.mounts,
        key=key,
        rank_launcher=(site.python, "-m", "torch.distributed.run"),
        shares=shares,
        flow_run=flow_run,
    )


def stage_document(job: StageJob, site: StageEnvironment) -> dict[str, Any]:
    """The options to write to the config document of a job.

    A stage with GPUs gets `device = "cuda"` unless the document names a device. Without CUDA in the
    image or on the node it then fails, instead of training on CPUs for a month."""
    given = {name: value for name, value in job.document.items() if value is not None}
    takes_device = any(name == "device" for name, _, _ in leaves(CONFIGS[job.stage]))
    if takes_device and site.resources_of(job.stage).gpus_per_node:
        given.setdefault("device", "cuda")
    return given
