"""The job blocks, by the name of their backend in a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect.blocks.core import Block

from flows.backends.container.job import ContainerJob
from flows.backends.kubernetes.job import KubernetesJob
from flows.backends.process import ProcessJob
from flows.backends.slurm.job import SlurmJob
from flows.backends.spec import LaunchSpec
from flows.yard.profile import StageEnvironment, Watch

StageJobBlock = ProcessJob | ContainerJob | SlurmJob | KubernetesJob


def _process(site: StageEnvironment, spec: LaunchSpec, stage: str) -> StageJobBlock:
    return ProcessJob(spec=spec)


def _container(site: StageEnvironment, spec: LaunchSpec, stage: str) -> StageJobBlock:
    watch = _watch_options(site.watch_of(stage))
    return ContainerJob(spec=spec, options=site.options_of(stage), **watch)


def _slurm(site: StageEnvironment, spec: LaunchSpec, stage: str) -> StageJobBlock:
    return SlurmJob(
        spec=spec, options=site.options_of(stage), **_watch_options(site.watch_of(stage))
    )


def _kubernetes(site: StageEnvironment, spec: LaunchSpec, stage: str) -> StageJobBlock:
    hang_seconds = site.watch_of(stage).hang_seconds
    return KubernetesJob(spec=spec, options=site.options_of(stage), hang_seconds=hang_seconds)


def _watch_options(watch: Watch) -> dict[str, Any]:
    """The options that the profile sets; the job block has defaults for the others."""
    options = {"hang_seconds": watch.hang_seconds, "poll_seconds": watch.poll_seconds}
    return {name: value for name, value in options.items() if value is not None}


JOB_BLOCKS: dict[str, Callable[[StageEnvironment, LaunchSpec, str], StageJobBlock]] = {
    "process": _process,
    "container": _container,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}
"""Builds a job block from the environment, the job, and the name of its stage."""

JOB_BLOCK_TYPES: tuple[type[Block], ...] = (ProcessJob, ContainerJob, SlurmJob, KubernetesJob)
"""The block types that are registered at a server, for its pages."""
