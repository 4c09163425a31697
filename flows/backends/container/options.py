"""Options of the container backend: engine, network, shared memory, user, credentials."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from flows.backends.option_checks import check_choice, check_pattern
from trainyard.errors import ConfigError
from trainyard.variables import OF_PREFECT

Pull = Literal["missing", "never"]

ENGINE = re.compile(r"(unix|tcp|http|https)://\S+")
NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*|container:[A-Za-z0-9][A-Za-z0-9_.-]*")
SIZE = re.compile(r"[1-9][0-9]*[bkmg]?")
USER = re.compile(r"[0-9]+(:[0-9]+)?|[a-z_][a-z0-9_-]*(:[a-z_][a-z0-9_-]*)?")
GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._/-]*")
CAPABILITY = re.compile(r"[A-Z][A-Z_]*")
DEVICE = re.compile(r"/dev/[A-Za-z0-9_./-]+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30}

OF_THE_STORE = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"),
)
"""Address and credentials of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """How containers are created: for all jobs, or for those of one stage."""

    engine: str | None = None
    """Address of the engine, `unix:///run/user/1000/docker.sock`; None: DOCKER_HOST, or the
    machine's socket."""
    pull: Pull = "missing"
    """Whether to pull an image that the engine does not have."""
    network: str | None = None
    """Network of the containers: a name, `bridge`, or `host`, by which stages reach every port of
    the machine. None: the engine's bridge; a job whose variables point to localhost is refused."""
    inherited_environment: tuple[str, ...] = OF_THE_STORE
    """Variables that containers inherit from the flow, if they are set: the credentials of the
    store. The engine keeps them with the container; they are in no run folder."""
    shared_memory: str = "16g"
    """Size of /dev/shm, which NCCL and data loaders use: 512m, 16g."""
    temporary_size: str = "50g"
    """Size of /tmp, in memory: the only writable folder besides mounts."""
    user: str | None = None
    """User, or `user:group`, that stages run as. None: that of the flow, so that all files of a
    local yard have one owner."""
    read_only: bool = True
    """The image's own files are read-only."""
    init: bool = True
    """Run an init process that forwards signals and reaps orphans."""
    gpus: tuple[str, ...] = ()
    """Indices or UUIDs of the GPUs to use; empty: any, as many as the job asks for."""
    capabilities: tuple[str, ...] = ()
    """Added capabilities, such as IPC_LOCK for InfiniBand; containers have no others."""
    devices: tuple[str, ...] = ()
    """Devices besides GPUs: `/dev/infiniband`."""

    def __post_init__(self) -> None:
        _check("engine", self.engine, ENGINE)
        check_choice("container option pull", self.pull, get_args(Pull))
        _check("network", self.network, NETWORK)
        _check("user", self.user, USER)
        for name in ("shared_memory", "temporary_size"):
            _check(name, getattr(self, name), SIZE)
        lists = {
            "inherited_environment": VARIABLE,
            "gpus": GPU,
            "capabilities": CAPABILITY,
            "devices": DEVICE,
        }
        for name, pattern in lists.items():
            for value in getattr(self, name):
                _check(name, value, pattern)
        if ours := [one for one in self.inherited_environment if one.startswith(OF_PREFECT)]:
            raise ConfigError(
                f"container option inherited_environment: {ours[0]} is Prefect's; its password "
                f"starts programs on the workers, so stages get no variable {OF_PREFECT}*"
            )


def size_bytes(text: str) -> int:
    """The bytes of a size such as `512m`."""
    unit = text[-1] if text[-1] in UNITS else "b"
    return int(text.rstrip("bkmg")) * UNITS[unit]


def _check(name: str, value: str | None, pattern: re.Pattern[str]) -> None:
    check_pattern(f"container option {name}", value, pattern)
