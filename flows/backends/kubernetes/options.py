"""What a Kubernetes cluster wants to know besides the job: namespace, volumes, which nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from trainyard.errors import ConfigError

Variant = Literal["auto", "job", "jobset"]
Effect = Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"]

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""DNS-1123: names of namespaces, claims, secrets, accounts."""
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
QUALIFIED = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")
CAPABILITY = re.compile(r"[A-Z][A-Z_]*")
PATH = re.compile(r"/[^:\0\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A persistent volume that pods see, such as the yard itself."""

    name: str
    """Of the PersistentVolumeClaim."""
    target: str
    """Where it is mounted."""
    read_only: bool = False

    def __post_init__(self) -> None:
        _check("claim", self.name, SUBDOMAIN)
        _check("claim target", self.target, PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint of nodes that does not keep pods away."""

    key: str
    value: str | None = None
    """None: whatever its value."""
    effect: Effect = ""
    """Empty: every effect."""

    def __post_init__(self) -> None:
        _check("toleration key", self.key, QUALIFIED)
        _check("toleration value", self.value, VALUE)
        if self.effect not in get_args(Effect):
            raise ConfigError(
                f"Kubernetes option toleration effect: {self.effect!r} is none of NoSchedule, "
                f"PreferNoSchedule, NoExecute"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """How jobs are described to a cluster; the same for all of them, or for those of a stage."""

    namespace: str = "default"
    kubeconfig: str | None = None
    """None: KUBECONFIG, ~/.kube/config, or within a pod its service account."""
    context: str | None = None
    """Of the kubeconfig; None: its current one."""
    variant: Variant = "auto"
    """An Indexed Job with a Service of our own, or a JobSet; `auto`: a JobSet for several nodes
    where its resource is installed."""
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    secret_environment: tuple[str, ...] = ()
    """Secrets whose entries become variables: the credentials of the store."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    extra_resources: Mapping[str, str] = field(default_factory=dict)
    """What else a pod asks for, such as `rdma/ib: "8"`."""
    claims: tuple[Claim, ...] = ()
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which NCCL and data loaders use; it counts as memory of the pod."""
    temporary_size: str = "50Gi"
    """Size of /tmp, the one place besides volumes that can be written."""
    user: int = 1000
    """User and group that stages run as; root is refused."""
    capabilities: tuple[str, ...] = ()
    """Capabilities besides none, such as IPC_LOCK for InfiniBand."""
    priority_class: str | None = None
    queue: str | None = None
    """Kueue's local queue: the job is made suspended, and let go when there is room."""
    keep_seconds: int = 86400
    """So long an ended job and its pods stay, for people to look at."""
    delete_after_success: bool = True
    """A job that went well goes at once; its logs are in the run folder."""
    broken_seconds: int = 300
    """So long pods may lack their image, a secret or a volume before the job is ended."""
    room_seconds: int | None = 3600
    """So long pods may find no room, or no quota, before the job is ended; None: for ever."""

    def __post_init__(self) -> None:
        _check("namespace", self.namespace, LABEL)
        if self.variant not in get_args(Variant):
            raise ConfigError(
                f"Kubernetes option variant: {self.variant!r} is none of "
                f"{', '.join(get_args(Variant))}"
            )
        for name in ("service_account", "priority_class", "queue"):
            _check(name, getattr(self, name), SUBDOMAIN)
        for name in ("image_pull_secrets", "secret_environment"):
            for value in getattr(self, name):
                _check(name, value, SUBDOMAIN)
        for name in ("shared_memory", "temporary_size"):
            _check(name, getattr(self, name), QUANTITY)
        for capability in self.capabilities:
            _check("capabilities", capability, CAPABILITY)
        self._check_pairs()
        if self.user < 1:
            raise ConfigError("Kubernetes option user: 0 is root, which stages do not need")
        for name in ("keep_seconds", "broken_seconds", "room_seconds"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(
                    f"Kubernetes option {name} must not be negative, got {getattr(self, name)}"
                )

    def _check_pairs(self) -> None:
        _check("gpu_resource", self.gpu_resource, QUALIFIED)
        for key, value in self.node_selector.items():
            _check("node_selector", key, QUALIFIED)
            _check(f"node_selector {key}", value, VALUE)
        for key, value in self.extra_resources.items():
            _check("extra_resources", key, QUALIFIED)
            _check(f"extra_resources {key}", value, QUANTITY)


def _check(name: str, value: str | None, pattern: re.Pattern[str]) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(
            f"Kubernetes option {name}: {value!r} is nothing that a cluster takes there "
            f"(it must match {pattern.pattern})"
        )
