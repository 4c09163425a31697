"""Options of the Kubernetes backend: namespace, volumes, nodes, waiting times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from flows.backends.option_checks import check_choice, check_not_negative, check_pattern
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
    """A persistent volume that pods mount, such as the yard itself."""

    name: str
    """Name of the PersistentVolumeClaim."""
    target: str
    """Where it is mounted."""
    read_only: bool = False

    def __post_init__(self) -> None:
        _check("claim", self.name, SUBDOMAIN)
        _check("claim target", self.target, PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint of nodes that pods tolerate."""

    key: str
    value: str | None = None
    """None: any value."""
    effect: Effect = ""
    """Empty: any effect."""

    def __post_init__(self) -> None:
        _check("toleration key", self.key, QUALIFIED)
        _check("toleration value", self.value, VALUE)
        check_choice("Kubernetes option toleration effect", self.effect, get_args(Effect))


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """How jobs are submitted to a cluster: for all of them, or for those of one stage."""

    namespace: str = "default"
    kubeconfig: str | None = None
    """None: KUBECONFIG, ~/.kube/config, or in a pod its service account."""
    context: str | None = None
    """Of the kubeconfig; None: the current one."""
    variant: Variant = "auto"
    """An Indexed Job with a Service of our own, or a JobSet. `auto`: a JobSet for several nodes if
    its resource is installed."""
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    secret_environment: tuple[str, ...] = ()
    """Secrets whose entries become environment variables: the credentials of the store."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    extra_resources: Mapping[str, str] = field(default_factory=dict)
    """Other resources of a pod, such as `rdma/ib: "8"`."""
    claims: tuple[Claim, ...] = ()
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which NCCL and data loaders use; it counts as memory of the pod."""
    temporary_size: str = "50Gi"
    """Size of /tmp, the only writable folder besides volumes."""
    user: int = 1000
    """User and group that stages run as; root is refused."""
    capabilities: tuple[str, ...] = ()
    """Added capabilities, such as IPC_LOCK for InfiniBand; pods have no others."""
    priority_class: str | None = None
    queue: str | None = None
    """Kueue's local queue: the job is created suspended, and Kueue starts it when there is room."""
    keep_seconds: int = 86400
    """How long an ended job and its pods are kept, for inspection."""
    delete_after_success: bool = True
    """Delete a successful job at once; its logs are in the run folder."""
    broken_seconds: int = 300
    """How long pods may lack their image, a secret or a volume before the job is ended."""
    room_seconds: int | None = 3600
    """How long pods may find no room or quota before the job is ended; None: no limit."""

    def __post_init__(self) -> None:
        _check("namespace", self.namespace, LABEL)
        check_choice("Kubernetes option variant", self.variant, get_args(Variant))
        for name in ("service_account", "priority_class", "queue"):
            _check(name, getattr(self, name), SUBDOMAIN)
        for name in ("image_pull_secrets", "secret_environment"):
            for value in getattr(self, name):
                _check(name, value, SUBDOMAIN)
        for name in ("shared_memory", "temporary_size"):
            _check(name, getattr(self, name), QUANTITY)
        for capability in self.capabilities:
            _check("capabilities", capability, CAPABILITY)
        _check("gpu_resource", self.gpu_resource, QUALIFIED)
        pairs = (("node_selector", VALUE), ("extra_resources", QUANTITY))
        for name, pattern in pairs:
            for key, value in getattr(self, name).items():
                _check(name, key, QUALIFIED)
                _check(f"{name} {key}", value, pattern)
        if self.user < 1:
            raise ConfigError("Kubernetes option user: 0 is root, which stages do not need")
        check_not_negative("Kubernetes", self, ("keep_seconds", "broken_seconds", "room_seconds"))


def _check(name: str, value: str | None, pattern: re.Pattern[str]) -> None:
    check_pattern(f"Kubernetes option {name}", value, pattern)
