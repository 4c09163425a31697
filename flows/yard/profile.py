"""The profile of a yard, and the environment of its stages: backend, resources, run folders.

docs/deployments.md explains every table. No Prefect here; `read_profile` reads one from a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.backends.container.options import ContainerOptions
from flows.backends.kubernetes.options import KubernetesOptions
from flows.backends.slurm.options import SlurmOptions
from flows.backends.spec import GRACE_SECONDS, Mount, Resources
from flows.stage_configs import CONFIGS
from flows.yard.links import check_browse
from trainyard.artifacts.folder_in_shares import InShares
from trainyard.artifacts.urls import basename, is_local, join, local_path, refuse_secrets
from trainyard.config import check_known
from trainyard.errors import ConfigError
from trainyard.version import VERSION

BACKEND_OPTIONS: dict[str, type | None] = {
    "process": None,
    "container": ContainerOptions,
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
}
"""Every backend by its name in a profile, with the class of its options."""

SCHEDULED = ("container", "slurm", "kubernetes")
"""Backends whose jobs outlive the program that started them."""

SHARING = ("process", "slurm", "kubernetes")
"""Backends that run one job in shares, side by side."""

CONTAINED = ("container", "kubernetes")
"""Backends whose stages run in images, with their own folders, /dev/shm and /tmp."""

POLLING = ("container", "slurm")
"""Backends that poll the state of a job; Kubernetes reports it."""

FRUITLESS_ATTEMPTS = 3
"""Attempts in a row without progress after which a stage is not retried, by default."""

MOST_RESUMED = 100
"""Highest resume_crashed: a run that crashes more often has another fault."""

CAN_BE_SHARED = tuple(stage for stage, config in CONFIGS.items() if issubclass(config, InShares))
"""Stages whose output several jobs can make in shares, which a last one joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResources:
    """The resources of a training in a yard."""

    world_size: int = 1
    gpu_memory_gib: float | None = None
    """Of each GPU; None: no GPU, or not stated."""

    def to_plan(self) -> dict[str, Any]:
        """Options of the plan; a single process leaves world_size to the recipe."""
        size = {"world_size": self.world_size} if self.world_size > 1 else {}
        memory = self.gpu_memory_gib
        return {**size, **({} if memory is None else {"gpu_memory_gib": memory})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a running job is watched and stopped."""

    hang_seconds: float | None = None
    """A running job without a log line or heartbeat for this long has hung: it is stopped and
    retried. None: no limit."""
    poll_seconds: float | None = None
    """Between two polls of an engine or a scheduler; None: the backend's default."""
    grace_seconds: float = GRACE_SECONDS
    """Between the signal to stop and SIGKILL, in which a training saves."""

    def __post_init__(self) -> None:
        for name in ("hang_seconds", "poll_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive or left out, got {value}")
        if not self.grace_seconds >= 0:
            raise ConfigError(f"grace_seconds must not be negative, got {self.grace_seconds}")


def limit_tag(yard: str, stage: str) -> str:
    """The name of a stage's limit in a yard; Prefect's server prefixes it with `tag:`."""
    return f"yard:{yard}:{stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnvironment:
    """Where the stages of a flow run, with which resources, and in which run folders."""

    run_folder: str
    """Local folder: DIR/JOB/ATTEMPT/ holds config.toml, log.txt, outcome.json or failure.json."""
    backend: str = "process"
    environment: dict[str, str] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    resources_by_stage: Mapping[str, Resources] = field(default_factory=dict)
    """For stages that need other resources."""
    watch: Watch = field(default_factory=Watch)
    watch_by_stage: Mapping[str, Watch] = field(default_factory=dict)
    python: str = sys.executable
    image: str | None = None
    """What stages run in, with placeholders `{stage}` and `{version}`. None: what is installed."""
    mounts: tuple[Mount, ...] = ()
    container: ContainerOptions = field(default_factory=ContainerOptions)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    options_by_stage: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend, for stages that need other ones."""
    images_by_stage: Mapping[str, str] = field(default_factory=dict)
    """For stages with an image of their own."""
    shares_by_stage: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs that make one output of a stage."""
    shares_at_once: int | None = None
    """Most of them that run at once; None: two processes of this machine, or all on a cluster."""
    yard: str = "local"
    """Name of the profile, which is part of the names of its limits."""
    limited: tuple[str, ...] = ()
    """Stages with a limit on concurrent jobs."""
    fruitless_attempts: int = FRUITLESS_ATTEMPTS
    """Attempts in a row that fail by infrastructure without a new step, after which a stage is not
    retried."""

    def __post_init__(self) -> None:
        if self.fruitless_attempts < 1:
            raise ConfigError(
                f"fruitless_attempts must be at least 1, got {self.fruitless_attempts}"
            )
        if self.backend not in BACKEND_OPTIONS:
            raise ConfigError(f"block {self.backend!r} is not one of {', '.join(BACKEND_OPTIONS)}")

    def resources_of(self, stage: str) -> Resources:
        """The resources that a stage asks for."""
        return self.resources_by_stage.get(stage, self.resources)

    def watch_of(self, stage: str) -> Watch:
        """How a stage's job is watched."""
        return self.watch_by_stage.get(stage, self.watch)

    def options_of(self, stage: str) -> Any:
        """The backend's options for a stage, such as SlurmOptions; None for a process."""
        if BACKEND_OPTIONS[self.backend] is None:
            return None
        return self.options_by_stage.get(stage, getattr(self, self.backend))

    def image_of(self, stage: str) -> str | None:
        """The image that a stage runs in."""
        image = self.images_by_stage.get(stage, self.image)
        if image is None:
            return None
        return image.replace("{stage}", stage.replace("_", "-")).replace("{version}", VERSION)

    def shares_of(self, stage: str) -> int:
        """Number of jobs that make an output of this stage; 1: no shares."""
        return self.shares_by_stage.get(stage, 1) if self.backend in SHARING else 1


# --- the profile --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The work pool whose workers run the flows of a yard."""

    name: str
    type: str = "process"
    """`process` is enough: a flow only waits for jobs, so it can run beside the worker."""
    concurrency_limit: int | None = None
    """Flow runs at once; None: any number."""
    code: str | None = None
    """Folder with trainyard's sources as workers see it; None: that of the registering program."""

    def __post_init__(self) -> None:
        if self.concurrency_limit is not None and self.concurrency_limit < 1:
            raise ConfigError(
                f"concurrency_limit must be at least 1, or left out for any number, got "
                f"{self.concurrency_limit}: no run could begin; to stop a yard for a while, "
                f"pause its pool (prefect work-pool pause {self.name})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSchedule:
    """When a deployment runs automatically."""

    cron: str
    timezone: str = "UTC"
    active: bool = True
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of the deployment, by hand too; they override those of prefect.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Automations:
    """What the server does automatically."""

    zombie_seconds: int = 120
    """A flow run without a heartbeat for this long is marked as crashed; 0: never."""
    resume_crashed: int = 3
    """Most restarts of a flow run that crashed because its worker or machine is gone; 0: none, it
    waits for a person's Retry."""
    notify_variable: str = "TRAINYARD_NOTIFY_URL"
    """Variable that has, when registering, the URL to which failures are posted; unset: none."""
    train_on_new_corpus: str | None = None
    """Recipe to train when corpus-refresh has published; None: none."""

    def __post_init__(self) -> None:
        if self.zombie_seconds and self.zombie_seconds < 60:
            raise ConfigError(
                f"zombie_seconds must be 0 or at least 60, got {self.zombie_seconds}: a flow run "
                f"sends a heartbeat every 30 seconds"
            )
        if not 0 <= self.resume_crashed <= MOST_RESUMED:
            raise ConfigError(
                f"resume_crashed must be from 0 to {MOST_RESUMED}, got {self.resume_crashed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of a yard, as written."""

    name: str
    backend: str = "process"
    """A key of BACKEND_OPTIONS; `block` in the file."""
    store: str | None = None
    """Root of all artifacts; None: `yard` in the working directory of the flow."""
    browse: str | None = None
    """URL that serves this root to browsers. None: links in pages are file:// and s3://, unless
    variable TRAINYARD_BROWSE is set."""
    run_folder: str | None = None
    """Folder of configs and logs, visible to the jobs. None: `.runs` beside the artifacts, or under
    ./yard if those are in an object store."""
    image: str | None = None
    """What stages run in, with placeholders `{stage}` and `{version}`. None: what is installed."""
    images: Mapping[str, str] = field(default_factory=dict)
    """For stages with an image of their own."""
    python: str | None = None
    """Interpreter of stages. None: that of the flow, or the image's `python`."""
    gpu_memory_gib: float | None = None
    """Of one training GPU: a layout that does not fit is refused before training."""
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    resources: Resources = field(default_factory=Resources)
    resources_by_stage: Mapping[str, Resources] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    watch_by_stage: Mapping[str, Watch] = field(default_factory=dict)
    shares: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs that make one output of a stage."""
    shares_at_once: int | None = None
    fruitless_attempts: int = FRUITLESS_ATTEMPTS
    """Attempts in a row without a new step, after which a stage is not retried."""
    options: Any = None
    """Of the backend, such as SlurmOptions."""
    options_by_stage: Mapping[str, Any] = field(default_factory=dict)
    pool: Pool
    deployments: tuple[str, ...] = ()
    """Flows to deploy; empty: all of prefect.yaml."""
    schedules: Mapping[str, FlowSchedule] = field(default_factory=dict)
    """By flow."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """By stage: most concurrent jobs, over all flows of the yard."""
    automations: Automations = field(default_factory=Automations)

    def __post_init__(self) -> None:
        _check_tables(self)

    def yard_root(self, yard: str | None = None) -> str:
        """Folder or URL of all runs: given, else variable YARD, else `store`, else `yard`."""
        root = yard or os.environ.get("YARD") or self.store or "yard"
        refuse_secrets(root)
        return root.rstrip("/")

    def training_resources(self) -> TrainingResources:
        """The resources of a training here, for the plan."""
        return TrainingResources(
            world_size=self.resources_of("pretrain").num_processes,
            gpu_memory_gib=self.gpu_memory_gib,
        )

    def resources_of(self, stage: str) -> Resources:
        """The resources that a stage asks for."""
        return self.resources_by_stage.get(stage, self.resources)

    def stage_environment(self, root: str) -> StageEnvironment:
        """Where the stages of a flow run whose artifacts are under `root`."""
        run_folder = self.run_folder and join(self.run_folder, basename(root))
        if run_folder is None:
            path = local_path(root) if is_local(root) else Path("yard", basename(root))
            assert path is not None
            run_folder = str(path.absolute() / ".runs")
        options = {} if self.options is None else {self.backend: self.options}
        return StageEnvironment(
            run_folder=run_folder,
            backend=self.backend,
            environment=dict(self.environment),
            resources=self.resources,
            resources_by_stage=self.resources_by_stage,
            watch=self.watch,
            watch_by_stage=self.watch_by_stage,
            python=self.python or (sys.executable if self.image is None else "python"),
            image=self.image,
            images_by_stage=self.images,
            options_by_stage=self.options_by_stage,
            mounts=self.mounts,
            shares_by_stage=self.shares,
            shares_at_once=self.shares_at_once,
            yard=self.name,
            limited=tuple(self.limits),
            fruitless_attempts=self.fruitless_attempts,
            **options,
        )


# --- checks across tables -------------------------------------------------------------------------


def _check_tables(profile: Profile) -> None:
    """Raise ConfigError for tables that contradict each other or name an unknown stage."""
    check_known(profile.images, CONFIGS, "[images]")
    check_known(profile.resources_by_stage, CONFIGS, "[resources]")
    check_known(profile.watch_by_stage, CONFIGS, "[watch]")
    check_known(profile.limits, CONFIGS, "[limits]")
    check_known(profile.shares, CAN_BE_SHARED, "[shares]")
    for name, table in (("limits", profile.limits), ("shares", profile.shares)):
        for stage, count in table.items():
            if count < 1:
                raise ConfigError(f"[{name}] {stage} must be at least 1, got {count}")
    _check_watch(profile)
    if profile.shares and profile.backend not in SHARING:
        raise ConfigError(
            f"[shares] are for block {', '.join(SHARING)}; block {profile.backend!r} starts one "
            f"container for an output, and `workers` of the stage use the cores of its machine"
        )
    if profile.shares_at_once is not None and profile.shares_at_once < 1:
        raise ConfigError(
            f"shares_at_once must be at least 1, or left out, got {profile.shares_at_once}"
        )
    _check_memory(profile)
    check_browse(profile.browse)
    if profile.backend == "process":
        _check_process(profile)
    if profile.fruitless_attempts < 1:
        raise ConfigError(
            f"fruitless_attempts must be at least 1, got {profile.fruitless_attempts}"
        )


def _check_process(profile: Profile) -> None:
    """Refuse options that a process of this machine would ignore."""
    wanted = (profile.resources, *profile.resources_by_stage.values())
    if any(one.num_processes > 1 for one in wanted):
        raise ConfigError(
            "[resources]: block 'process' starts one process; a training starts its ranks on "
            "this machine itself, with nproc_per_node in the recipe's [pretrain]"
        )
    for key in ("image", "images", "mounts"):
        if getattr(profile, key):
            raise ConfigError(
                f"{key}: block 'process' runs what is installed here and starts no container; "
                f'leave it out, or choose block = "container"'
            )


def _check_memory(profile: Profile) -> None:
    memory = profile.gpu_memory_gib
    if memory is None:
        return
    if memory <= 0:
        raise ConfigError(f"gpu_memory_gib must be positive, got {memory}")
    # A process uses the GPUs of its machine without asking for them.
    if profile.backend != "process" and not profile.resources_of("pretrain").gpus_per_node:
        raise ConfigError(
            f"gpu_memory_gib ({memory:g}) is the memory of a training GPU, and here a training "
            f"gets none: set gpus_per_node in [resources.pretrain], or leave gpu_memory_gib out"
        )


def _check_watch(profile: Profile) -> None:
    for name, backends in (("hang_seconds", SCHEDULED), ("poll_seconds", POLLING)):
        wanted = (profile.watch, *profile.watch_by_stage.values())
        if profile.backend not in backends and any(
            getattr(one, name) is not None for one in wanted
        ):
            raise ConfigError(
                f"[watch] {name} is for block {', '.join(backends)}; block {profile.backend!r} "
                f"does not use it: leave it out"
            )
