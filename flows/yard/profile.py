"""Yard profiles: where stages run, with what means, and where all that is made lies.

docs/deployments.md explains every table. No Prefect here; `read_profile` reads one from a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.backends.spec import Mount, Resources
from flows.stage_configs import CONFIGS
from flows.yard.links import check_browse
from flows.yard.place import (
    FRUITLESS_ATTEMPTS,
    POLLING,
    SCHEDULED,
    SHARING,
    StageEnvironment,
    TrainingResources,
    Watch,
)
from flows.yard.tables import refuse_unknown
from trainyard.artifacts.urls import basename, is_local, join, local_path
from trainyard.errors import ConfigError

MOST_RESUMED = 100
"""Of resume_crashed: what is lost more often than that has another fault."""

CAN_BE_SHARED = ("tokenize",)
"""Stages whose output several jobs can make together, and one joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The work pool whose workers run the flows of a yard."""

    name: str
    type: str = "process"
    """A flow only waits for jobs, so a process beside the worker does, everywhere."""
    concurrency_limit: int | None = None
    """Flow runs at once; None: any number."""
    code: str | None = None
    """Folder with trainyard's sources as workers see it; None: that of whoever registers."""

    def __post_init__(self) -> None:
        if self.concurrency_limit is not None and self.concurrency_limit < 1:
            raise ConfigError(
                f"concurrency_limit must be at least 1, or left out for any number, got "
                f"{self.concurrency_limit}: no run would ever begin; to stop a yard for a while, "
                f"pause its pool (prefect work-pool pause {self.name})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a deployment runs by itself."""

    cron: str
    timezone: str = "UTC"
    active: bool = True
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of these runs, over those of prefect.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Automations:
    """What the server does by itself."""

    zombie_seconds: int = 120
    """A flow run that was not heard of for so long is marked as crashed; 0: never."""
    resume_crashed: int = 3
    """A flow run that crashed because its worker or machine is gone is started again by itself, so
    often at most; 0: it waits for a person's Retry."""
    notify_variable: str = "TRAINYARD_NOTIFY_URL"
    """Variable of whoever registers with the URL that failures are posted to; not set: none is."""
    train_on_new_corpus: str | None = None
    """Recipe that is trained when corpus-refresh has published; None: nothing is."""

    def __post_init__(self) -> None:
        if self.zombie_seconds and self.zombie_seconds < 60:
            raise ConfigError(
                f"zombie_seconds must be 0 or at least 60, got {self.zombie_seconds}: a flow run "
                f"is heard every 30 seconds"
            )
        if not 0 <= self.resume_crashed <= MOST_RESUMED:
            raise ConfigError(
                f"resume_crashed must be from 0 to {MOST_RESUMED}, got {self.resume_crashed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A yard as written."""

    name: str
    block: str = "process"
    """What starts stages: a key of flows.yard.place.BLOCK_OPTIONS."""
    store: str | None = None
    """Root of everything that is made; None: `yard` where the flow runs."""
    browse: str | None = None
    """URL where a browser finds what lies under that root; None: links of pages are file:// and
    s3://, unless variable TRAINYARD_BROWSE says more."""
    run_folder: str | None = None
    """Folder of configs and logs, seen by the jobs; None: `.runs` beside what is made, or under
    ./yard where that is an object store."""
    image: str | None = None
    """What stages run in; `{stage}` and `{version}` stand for theirs. None: what is installed."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Of stages that have another one."""
    python: str | None = None
    """Interpreter of stages; None: that of the flow, or the image's `python`."""
    gpu_memory_gib: float | None = None
    """Of one GPU that trains: a layout that does not fit is refused before training."""
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    resources: Resources = field(default_factory=Resources)
    resources_by_stage: Mapping[str, Resources] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    watch_by_stage: Mapping[str, Watch] = field(default_factory=dict)
    shares: Mapping[str, int] = field(default_factory=dict)
    """Jobs that make one output of a stage together."""
    shares_at_once: int | None = None
    fruitless_attempts: int = FRUITLESS_ATTEMPTS
    """Attempts at a stage in a row without a step gained, after which it is given up."""
    options: Any = None
    """Of the block: SlurmOptions and so on."""
    options_by_stage: Mapping[str, Any] = field(default_factory=dict)
    pool: Pool
    deployments: tuple[str, ...] = ()
    """Flows that are deployed; none named: all of prefect.yaml."""
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """By flow."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """By stage: jobs at once, over all flows of the yard."""
    automations: Automations = field(default_factory=Automations)

    def __post_init__(self) -> None:
        _check_tables(self)

    def yard_root(self, yard: str | None = None) -> str:
        """Folder or URL of all runs: given, else variable YARD, else the profile's, else `yard`."""
        return (yard or os.environ.get("YARD") or self.store or "yard").rstrip("/")

    def means(self) -> TrainingResources:
        """What a training gets here, as the plan takes it."""
        return TrainingResources(
            world_size=self.resources_of("pretrain").num_processes,
            gpu_memory_gib=self.gpu_memory_gib,
        )

    def resources_of(self, stage: str) -> Resources:
        """What a stage asks for."""
        return self.resources_by_stage.get(stage, self.resources)

    def place(self, root: str) -> StageEnvironment:
        """Where the stages of a flow run whose artifacts lie under `root`."""
        options = {} if self.options is None else {self.block: self.options}
        return StageEnvironment(
            run_folder=self._run_folder(root),
            block=self.block,
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

    def _run_folder(self, root: str) -> str:
        if self.run_folder is not None:
            return join(self.run_folder, basename(root))
        path = local_path(root) if is_local(root) else Path("yard", basename(root))
        assert path is not None
        return str(path.absolute() / ".runs")


# --- what the tables cannot say together: each is refused by its key --------------------------


def _check_tables(profile: Profile) -> None:
    """ConfigError for tables that do not go together, or name a stage that is none."""
    _check_stages(profile)
    _check_watch(profile)
    _check_shares(profile)
    _check_memory(profile)
    check_browse(profile.browse)
    if profile.block == "process":
        _check_process(profile)
    if profile.fruitless_attempts < 1:
        raise ConfigError(
            f"fruitless_attempts must be at least 1, got {profile.fruitless_attempts}"
        )


def _check_stages(profile: Profile) -> None:
    refuse_unknown(profile.images, CONFIGS, "[images]")
    refuse_unknown(profile.resources_by_stage, CONFIGS, "[resources]")
    refuse_unknown(profile.watch_by_stage, CONFIGS, "[watch]")
    refuse_unknown(profile.limits, CONFIGS, "[limits]")
    refuse_unknown(profile.shares, CAN_BE_SHARED, "[shares]")
    for name, table in (("limits", profile.limits), ("shares", profile.shares)):
        for stage, count in table.items():
            if count < 1:
                raise ConfigError(f"[{name}] {stage} must be at least 1, got {count}")


def _check_shares(profile: Profile) -> None:
    if profile.shares and profile.block not in SHARING:
        raise ConfigError(
            f"[shares] are for a block with a scheduler, {' or '.join(SHARING)}; block "
            f"{profile.block!r} has none, and `workers` of the stage use the cores of one machine"
        )
    if profile.shares_at_once is not None and profile.shares_at_once < 1:
        raise ConfigError(
            f"shares_at_once must be at least 1, or left out, got {profile.shares_at_once}"
        )


def _check_process(profile: Profile) -> None:
    """What a process of this machine has not, and nobody would heed."""
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
    # A process takes the GPUs of its machine, and nobody has to ask for them.
    if profile.block != "process" and not profile.resources_of("pretrain").gpus_per_node:
        raise ConfigError(
            f"gpu_memory_gib ({memory:g}) is what a GPU of a training has, and here a training "
            f"gets none: say gpus_per_node in [resources.pretrain], or leave gpu_memory_gib out"
        )


def _check_watch(profile: Profile) -> None:
    for name, blocks in (("hang_seconds", SCHEDULED), ("poll_seconds", POLLING)):
        wanted = (profile.watch, *profile.watch_by_stage.values())
        if profile.block not in blocks and any(getattr(one, name) is not None for one in wanted):
            raise ConfigError(
                f"[watch] {name} is for block {', '.join(blocks)}; block {profile.block!r} does "
                f"not look that way: leave it out"
            )
