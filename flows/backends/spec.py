"""What to start, and with which resources: one description for every backend.

A backend (process, container, Slurm, Kubernetes) takes a LaunchSpec and knows nothing else of the
stage. Pure data. No secret belongs in it: credentials reach a stage through its environment where
it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainyard.errors import ConfigError
from trainyard.variables import looks_secret

GRACE_SECONDS = 20.0
"""Between SIGTERM and SIGKILL: enough to save a checkpoint, short for a person who waits."""

NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]*[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IMAGE = re.compile(r"[A-Za-z0-9/._-][A-Za-z0-9/._:@#+=-]*")
"""A reference to a registry (also `nvcr.io#nvidia/pytorch:25.09-py3`) or the path of an image."""
MOUNTED = re.compile(r"/[^,:\n\0]*")
"""A path that every runtime's list of mounts can express."""
KEY = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder of the host that a container sees."""

    source: str
    target: str
    read_only: bool = True

    def __post_init__(self) -> None:
        for end in ("source", "target"):
            path = getattr(self, end)
            if not MOUNTED.fullmatch(path):
                raise ConfigError(
                    f"mount {end} {path!r}: write an absolute path without ',' and ':'; container "
                    f"runtimes take lists of them"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parts of one output, made side by side; each part gets `--rank K --world-size COUNT`."""

    count: int
    only: tuple[int, ...] = ()
    """The shares to make, such as those that failed; empty: all."""
    at_once: int | None = None
    """Most shares that run at once; None: as the backend decides."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"shares: count must be at least 1, got {self.count}")
        if self.at_once is not None and self.at_once < 1:
            raise ConfigError(f"shares: at_once must be at least 1, got {self.at_once}")
        strangers = sorted({index for index in self.only if not 0 <= index < self.count})
        if strangers:
            raise ConfigError(
                f"shares: {strangers} are not among {self.count} shares, which count from 0"
            )

    @property
    def indices(self) -> tuple[int, ...]:
        """The shares to make, in order, each once."""
        return tuple(sorted(set(self.only))) or tuple(range(self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a job requests from its backend; a local process uses what the machine has."""

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

    @property
    def num_processes(self) -> int:
        """Processes on all nodes: ranks, if there are several."""
        return self.nodes * self.processes_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One job: a submission of a stage, with its own run folder."""

    name: str
    """Name of the job in a queue or a list of processes: `pretrain`, `tokenize-00003`."""
    command: tuple[str, ...]
    """Program and arguments of one process; no shell reads them."""
    run_directory: str
    """Folder of this attempt; the job writes failure.json or outcome.json there."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment where the job runs."""
    working_directory: str | None = None
    """None: that of the launcher."""
    grace_seconds: float = GRACE_SECONDS
    resources: Resources = field(default_factory=Resources)
    image: str | None = None
    """Container image; None: what is installed where the job runs."""
    mounts: tuple[Mount, ...] = ()
    key: str = ""
    """Finds this submission in the backend again (flows/backends/run_folder.py); a local process
    needs none."""
    rank_launcher: tuple[str, ...] = ("torchrun",)
    """Starts the processes of a node if there are several, and connects those of all nodes."""
    shares: Shares | None = None
    flow_run: str = ""
    """Name and id of the flow run that starts the job, for lists of a backend's jobs."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"job name {self.name!r}: use lower-case letters, digits, '-', '_' and '.'"
            )
        if not self.command:
            raise ConfigError(f"job {self.name}: the command is empty")
        if self.grace_seconds < 0:
            raise ConfigError(f"grace_seconds must not be negative, got {self.grace_seconds}")
        if self.image is not None and not IMAGE.fullmatch(self.image):
            raise ConfigError(f"job {self.name}: {self.image!r} is not a reference to an image")
        if self.key and not KEY.fullmatch(self.key):
            raise ConfigError(
                f"job {self.name}: key {self.key!r}: at most 40 lower-case letters, digits and '-'"
            )
        if self.shares is not None and self.has_ranks:
            raise ConfigError(
                f"job {self.name}: a share is made by one process, so shares exclude nodes "
                f"({self.resources.nodes}) and processes_per_node "
                f"({self.resources.processes_per_node}) above 1"
            )
        if self.has_ranks and not self.rank_launcher:
            raise ConfigError(f"job {self.name}: several processes need a rank_launcher")
        self._check_text()

    @property
    def has_ranks(self) -> bool:
        """Whether several processes work together, on one node or on many."""
        return self.resources.num_processes > 1

    @property
    def mounts_with_run_folder(self) -> tuple[Mount, ...]:
        """The mounts, and the run folder at its own path."""
        run = Mount(source=self.run_directory, target=self.run_directory, read_only=False)
        return (*self.mounts, run)

    def _check_text(self) -> None:
        for key in self.environment:
            if not VARIABLE.fullmatch(key):
                raise ConfigError(
                    f"job {self.name}: {key!r} is not a valid name of an environment variable"
                )
            if looks_secret(key):
                raise ConfigError(
                    f"job {self.name}: {key} looks like a secret and would be stored with the run; "
                    f"set it in the environment where the job runs"
                )
        texts: Iterable[str] = (*self.command, *self.rank_launcher, *self.environment.values())
        if any("\0" in text for text in texts):
            raise ConfigError(f"job {self.name}: no argument and no variable may hold a NUL")
