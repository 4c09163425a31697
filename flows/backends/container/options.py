"""What a Docker engine wants to know besides the job: network, shared memory, user, credentials."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from flows.backends.spec import OF_PREFECT
from trainyard.errors import ConfigError

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
"""Variables that lead to the store, and open it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """How containers are made on a machine; the same for all jobs, or for those of a stage."""

    engine: str | None = None
    """Address of the engine, `unix:///run/user/1000/docker.sock`; None: DOCKER_HOST, or the
    socket of the machine."""
    pull: Pull = "missing"
    """Whether an image that the engine does not have is looked for in its registry."""
    network: str | None = None
    """Network of the containers. None: the engine's own, from which only the outside can be
    reached; or the machine's, when a variable of the job leads to localhost."""
    inherited_environment: tuple[str, ...] = OF_THE_STORE
    """Variables that containers get from whoever starts them, where they are set: the credentials
    of the store. The engine knows them as long as the container is there; no run folder does."""
    shared_memory: str = "16g"
    """Bound of /dev/shm, which NCCL and data loaders use: 512m, 16g."""
    temporary_size: str = "50g"
    """Bound of /tmp, in memory: the one place besides mounts that can be written."""
    user: str | None = None
    """User, or `user:group`, that stages run as. None: that of the flow, so that run folders and
    local yards belong to one."""
    read_only: bool = True
    """The image's own files cannot be changed."""
    init: bool = True
    """A first process that hands signals on and buries orphans."""
    gpus: tuple[str, ...] = ()
    """Indices or UUIDs of the GPUs to be used; empty: as many as the job asks for, any of them."""
    capabilities: tuple[str, ...] = ()
    """Capabilities besides none, such as IPC_LOCK for InfiniBand."""
    devices: tuple[str, ...] = ()
    """Devices besides GPUs: `/dev/infiniband`."""

    def __post_init__(self) -> None:
        _check("engine", self.engine, ENGINE)
        if self.pull not in get_args(Pull):
            raise ConfigError(
                f"container option pull: {self.pull!r} is none of {', '.join(get_args(Pull))}"
            )
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
                f"container option inherited_environment: {ours[0]} is Prefect's; who has its "
                f"password starts programs on the workers, so stages get no variable {OF_PREFECT}*"
            )


def size_bytes(text: str) -> int:
    """What `512m` means."""
    unit = text[-1] if text[-1] in UNITS else "b"
    return int(text.rstrip("bkmg")) * UNITS[unit]


def _check(name: str, value: str | None, pattern: re.Pattern[str]) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(
            f"container option {name}: {value!r} is nothing that an engine takes there "
            f"(it must match {pattern.pattern})"
        )
