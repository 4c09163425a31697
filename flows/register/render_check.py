"""Renders every stage of a yard as a flow would start it, and discards the result, so that
registration refuses options that a backend would refuse later.

Pure: it contacts no engine, scheduler or cluster; `python -m flows.doctor` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flows.backends.container.render import Host, render_container
from flows.backends.kubernetes.manifests import render_kubernetes
from flows.backends.run_folder import job_key
from flows.backends.slurm.script import render_slurm
from flows.backends.spec import LaunchSpec, Shares
from flows.recipes.stage_job import StageJob
from flows.runner.stage_spec import stage_spec
from flows.stage_configs import CONFIGS
from flows.yard.profile import CONTAINED, Profile, StageEnvironment
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError

CANCEL_SECONDS = 30
"""After so long Prefect's worker kills the flow of a cancelled run."""

KEY = job_key("rehearsal", "rehearsal", 1)


def _process(spec: LaunchSpec, options: Any) -> None:
    """Nothing to render: a process is its command."""


def _container(spec: LaunchSpec, options: Any) -> None:
    render_container(spec, options, Host(user="0:0"))


RENDERERS: dict[str, Callable[[LaunchSpec, Any], object]] = {
    "process": _process,
    "container": _container,
    "slurm": render_slurm,
    "kubernetes": render_kubernetes,
}
"""By backend: renders a job as its request."""


def check_rendering(profile: Profile, sources: Path) -> None:
    """ConfigError if any stage cannot be rendered.

    sources: the working directory of workers, to which relative folders refer."""
    _check_grace(profile)
    _check_images(profile)
    site = profile.stage_environment(join(profile.yard_root(), "rehearsal"))
    refused: dict[str, ConfigError] = {}
    for stage in CONFIGS:
        for job in _jobs(stage, site):
            try:
                _render(job, site, sources)
            except ConfigError as error:
                refused.setdefault(stage, error)
    for stage, fault in refused.items():
        others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise ConfigError(
            f"yard {profile.name}: stage {stage}{others} could not be started: {fault}"
        ) from fault


def _jobs(stage: str, site: StageEnvironment) -> Iterator[StageJob]:
    yield StageJob(stage=stage, document={}, output=None)
    if (count := site.shares_of(stage)) > 1:
        yield StageJob(stage=stage, document={}, output=None, num_shares=count)


def _render(job: StageJob, site: StageEnvironment, sources: Path) -> None:
    shares = None
    if job.num_shares:
        shares = Shares(count=job.num_shares, at_once=site.shares_at_once)
    folder = Path(sources, site.run_folder, "job", KEY)
    spec = stage_spec(job, site, folder, KEY, shares)
    RENDERERS[site.backend](spec, site.options_of(job.stage))


def _check_grace(profile: Profile) -> None:
    tables = {"[watch]": profile.watch}
    tables |= {f"[watch.{stage}]": watch for stage, watch in profile.watch_by_stage.items()}
    for table, watch in tables.items():
        if watch.grace_seconds >= CANCEL_SECONDS:
            raise ConfigError(
                f"yard {profile.name} {table}: grace_seconds ({watch.grace_seconds:g}) must be "
                f"under {CANCEL_SECONDS}: Prefect's worker kills the flow of a cancelled run after "
                f"that, and then nothing would stop the job"
            )


def _check_images(profile: Profile) -> None:
    if profile.backend not in CONTAINED or profile.image is not None:
        return
    without = [stage for stage in CONFIGS if stage not in profile.images]
    if without:
        raise ConfigError(
            f"yard {profile.name}: block {profile.backend!r} runs images, and none is named for "
            f'{", ".join(without)}: write image = "trainyard/{{stage}}:{{version}}", or name '
            f"one for each stage in [images]"
        )
