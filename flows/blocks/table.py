"""The job blocks, by the name that a yard gives."""

from __future__ import annotations

from collections.abc import Callable

from prefect.blocks.core import Block

from flows.blocks.container import ContainerJob
from flows.blocks.kubernetes import KubernetesJob
from flows.blocks.process import ProcessJob
from flows.blocks.slurm import SlurmJob
from flows.launch.spec import LaunchSpec
from flows.place import Place

StageBlock = ProcessJob | ContainerJob | SlurmJob | KubernetesJob


def _process(place: Place, spec: LaunchSpec) -> StageBlock:
    return ProcessJob(spec=spec)


def _container(place: Place, spec: LaunchSpec) -> StageBlock:
    return ContainerJob(spec=spec, options=place.container)


def _slurm(place: Place, spec: LaunchSpec) -> StageBlock:
    return SlurmJob(spec=spec, options=place.slurm)


def _kubernetes(place: Place, spec: LaunchSpec) -> StageBlock:
    return KubernetesJob(spec=spec, options=place.kubernetes)


BLOCKS: dict[str, Callable[[Place, LaunchSpec], StageBlock]] = {
    "process": _process,
    "container": _container,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}
"""Where a stage can run."""

BLOCK_TYPES: tuple[type[Block], ...] = (ProcessJob, ContainerJob, SlurmJob, KubernetesJob)
"""What a server is told of, for its pages."""
