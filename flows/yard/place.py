"""Where the stages of a flow run, and with what means. Knows no orchestrator."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.backends.container.options import ContainerOptions
from flows.backends.kubernetes.options import KubernetesOptions
from flows.backends.slurm.options import SlurmOptions
from flows.backends.spec import GRACE_SECONDS, Mount, Resources
from trainyard.errors import ConfigError
from trainyard.version import VERSION

BLOCK_OPTIONS: dict[str, type | None] = {
    "process": None,
    "container": ContainerOptions,
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
}
"""Every place that stages can run in, by the name a yard gives, with what it wants to know."""

SCHEDULED = ("container", "slurm", "kubernetes")
"""Blocks whose jobs outlive the program that started them."""

SHARING = ("slurm", "kubernetes")
"""Blocks that run one job in shares, side by side."""

CONTAINED = ("container", "kubernetes")
"""Blocks whose stages run in images: with folders, /dev/shm and /tmp that may not be ours."""

POLLING = ("container", "slurm")
"""Blocks that ask how a job is; Kubernetes tells by itself."""

FRUITLESS_ATTEMPTS = 3
"""Attempts in a row without progress after which a stage is given up, unless a yard says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResources:
    """What the yard gives a training."""

    world_size: int = 1
    gpu_memory_gib: float | None = None
    """Of each GPU; None: there are none, or nobody said."""

    def to_plan(self) -> dict[str, Any]:
        """Options of the plan; a single process leaves the number to the recipe."""
        size = {"world_size": self.world_size} if self.world_size > 1 else {}
        memory = self.gpu_memory_gib
        return {**size, **({} if memory is None else {"gpu_memory_gib": memory})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a job is looked after while it runs, and ended."""

    hang_seconds: float | None = None
    """A running job that says nothing for so long, in its log or by its heartbeat file, has hung:
    it is ended and tried again. None: it may be silent."""
    poll_seconds: float | None = None
    """Between two questions to an engine or a scheduler; None: the block's own."""
    grace_seconds: float = GRACE_SECONDS
    """Between the signal to stop and SIGKILL: a training saves meanwhile."""

    def __post_init__(self) -> None:
        for name in ("hang_seconds", "poll_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive or left out, got {value}")
        if not self.grace_seconds >= 0:
            raise ConfigError(f"grace_seconds must not be negative, got {self.grace_seconds}")


def limit_tag(yard: str, stage: str) -> str:
    """The name of a stage's limit in a yard; Prefect's server calls it `tag:` and this."""
    return f"yard:{yard}:{stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnvironment:
    """Where the stages of a flow run, and where their run folders lie."""

    run_folder: str
    """Local folder: DIR/JOB/ATTEMPT/ holds config.toml, log.txt, outcome.json or failure.json."""
    block: str = "process"
    environment: dict[str, str] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    resources_by_stage: Mapping[str, Resources] = field(default_factory=dict)
    """For stages that need something else than the others."""
    watch: Watch = field(default_factory=Watch)
    watch_by_stage: Mapping[str, Watch] = field(default_factory=dict)
    python: str = sys.executable
    image: str | None = None
    """What stages run in; `{stage}` and `{version}` stand for theirs. None: what is installed."""
    mounts: tuple[Mount, ...] = ()
    container: ContainerOptions = field(default_factory=ContainerOptions)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    options_by_stage: Mapping[str, Any] = field(default_factory=dict)
    """Of the block, for stages that need other ones than `container`, `slurm` or `kubernetes`."""
    images_by_stage: Mapping[str, str] = field(default_factory=dict)
    """For stages that have an image of their own."""
    shares_by_stage: Mapping[str, int] = field(default_factory=dict)
    """Jobs that make one output of a stage together."""
    shares_at_once: int | None = None
    """Of them side by side; None: as many as there is room for."""
    yard: str = "local"
    """Name of the profile, by which its limits are known."""
    limited: tuple[str, ...] = ()
    """Stages of which the yard runs so many at once and no more."""
    fruitless_attempts: int = FRUITLESS_ATTEMPTS
    """Attempts at a stage in a row, each ended by infrastructure and without a step gained, after
    which it is given up."""

    def __post_init__(self) -> None:
        if self.fruitless_attempts < 1:
            raise ConfigError(
                f"fruitless_attempts must be at least 1, the first, got {self.fruitless_attempts}"
            )
        if self.block not in BLOCK_OPTIONS:
            raise ConfigError(f"block {self.block!r} is none of {', '.join(BLOCK_OPTIONS)}")

    def resources_of(self, stage: str) -> Resources:
        """What a stage asks for."""
        return self.resources_by_stage.get(stage, self.resources)

    def watch_of(self, stage: str) -> Watch:
        """How a stage's job is looked after."""
        return self.watch_by_stage.get(stage, self.watch)

    def options_of(self, stage: str) -> Any:
        """What the block is told for a stage: SlurmOptions and so on; None for a process."""
        if BLOCK_OPTIONS[self.block] is None:
            return None
        return self.options_by_stage.get(stage, getattr(self, self.block))

    def image_of(self, stage: str) -> str | None:
        """The image that a stage runs in."""
        image = self.images_by_stage.get(stage, self.image)
        if image is None:
            return None
        return image.replace("{stage}", stage.replace("_", "-")).replace("{version}", VERSION)

    def shares_of(self, stage: str) -> int:
        """Jobs that make an output of this stage together; 1: it is not shared out."""
        return self.shares_by_stage.get(stage, 1) if self.block in SHARING else 1
