"""What is to be started, and with what means: one description for every place a stage can run in.

A block (local process, container, Slurm, Kubernetes) takes a LaunchSpec and knows nothing else of
the stage. Pure data: no place is known here. No secret belongs in it: credentials reach a stage
through the environment of the place where it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainyard.errors import ConfigError

GRACE_SECONDS = 20.0
"""Between SIGTERM and SIGKILL: enough to save a checkpoint, little for a person who waits."""

NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]*[a-z0-9])?")
SECRET = re.compile(
    r"(^|_)(SECRET|PASSWORD|TOKEN|CREDENTIALS?|(ACCESS|API|PRIVATE)_KEY(_ID)?)(_|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder of the host that a container sees."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a job asks its place for; a local process takes what the machine has."""

    nodes: int = 1
    processes_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    memory_bytes_per_node: int | None = None
    time_limit_seconds: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "processes_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.gpus_per_node < 0:
            raise ConfigError(f"gpus_per_node must not be negative, got {self.gpus_per_node}")
        for name in ("cpus_per_node", "memory_bytes_per_node", "time_limit_seconds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive or left out, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One attempt at one job."""

    name: str
    """What the job is called in a queue or a list of processes: `pretrain`, `tokenize-00003`."""
    command: tuple[str, ...]
    run_directory: str
    """Folder of this attempt alone, seen by the job: failure.json and outcome.json appear in it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the place."""
    working_directory: str | None = None
    """None: where the launcher stands."""
    grace_seconds: float = GRACE_SECONDS
    resources: Resources = field(default_factory=Resources)
    image: str | None = None
    """Container image; None: the environment that is installed there."""
    mounts: tuple[Mount, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"job name {self.name!r}: use lower-case letters, digits, '-', '_' and '.'"
            )
        if not self.command:
            raise ConfigError(f"job {self.name}: the command is empty")
        if self.grace_seconds < 0:
            raise ConfigError(f"grace_seconds must not be negative, got {self.grace_seconds}")
        for key in self.environment:
            if SECRET.search(key.upper()):
                raise ConfigError(
                    f"job {self.name}: {key} looks like a secret and would be stored with the run; "
                    f"set it in the environment of the place where the job runs"
                )
