"""The pods of a job: what runs in them, with what means, and what they may not do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from flows.backends.kubernetes.options import KubernetesOptions, Toleration
from flows.backends.spec import LaunchSpec, Resources

Document = dict[str, Any]

CONTAINER = "stage"
PORT = 29500
INDEX = "YARD_INDEX"
"""Variable of a container with the completion index of its pod."""
SHARES = "YARD_SHARES"
"""Variable with the shares to make, where these are not all: the N-th is that of index N."""
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
MIB = 2**20

SAVE_FIRST = """
for one in /proc/[0-9]*; do
  grep -qzxF "TRAINYARD_RUN_DIR=$TRAINYARD_RUN_DIR" "$one/environ" 2>/dev/null &&
    grep -qz "^LOCAL_RANK=" "$one/environ" 2>/dev/null && ranks="$ranks ${one#/proc/}"
done
kill -USR1 $ranks 2>/dev/null
for one in $ranks; do
  while kill -0 "$one" 2>/dev/null; do sleep 0.5; done
done
"""
"""What a pod does before SIGTERM: ranks save. torchrun would leave them 30 s for it; so they have
all of the grace, whether the pod is preempted, drained or deleted."""

ONE_OF_THEM = """
position=0
for share in $YARD_SHARES; do
  [ "$position" -eq "$YARD_INDEX" ] && break
  position=$((position + 1))
done
export TRAINYARD_RUN_DIR="$TRAINYARD_RUN_DIR/share-$share"
set -- "$@" --rank "$share"
"""
"""How a pod becomes one of the shares to make: completion indices count from 0 without gaps."""


BEGIN_ANEW = """
rm -f "$TRAINYARD_RUN_DIR/failure.json" "$TRAINYARD_RUN_DIR/outcome.json"
if ! command -v "$1" >/dev/null; then
  echo "$1: the image has no such program; correct the image or the python of the yard" >&2
  exit 2
fi
exec "$@"
"""
"""How a pod that works alone begins: one before it may have been taken away, and have said why it
stopped. Of several nodes none is replaced, and another one may have said already why it fails."""


def render_pod(
    spec: LaunchSpec, options: KubernetesOptions, head: str, subdomain: str | None
) -> Document:
    """The specification of the pods of a job.

    head: DNS name of pod 0; subdomain: the Service that gives pods their names."""
    volumes = list(_volumes(spec, options))
    pod: Document = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(spec.grace_seconds),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, options, head, volumes)],
        "volumes": [{"name": name, **source} for name, source, _ in volumes],
    }
    if subdomain is not None and spec.resources.nodes > 1:
        pod["subdomain"] = subdomain
    if spec.shares is not None and spec.resources.time_limit_seconds is not None:
        pod["activeDeadlineSeconds"] = spec.resources.time_limit_seconds
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    if options.priority_class is not None:
        pod["priorityClassName"] = options.priority_class
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        pod["tolerations"] = [_toleration(one) for one in options.tolerations]
    if options.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    return pod


def _toleration(one: Toleration) -> Document:
    told = {"key": one.key, "operator": "Exists" if one.value is None else "Equal"}
    if one.value is not None:
        told["value"] = one.value
    return {**told, **({"effect": one.effect} if one.effect else {})}


def _container(
    spec: LaunchSpec,
    options: KubernetesOptions,
    head: str,
    volumes: list[tuple[str, Document, Document]],
) -> Document:
    container: Document = {
        "name": CONTAINER,
        "image": spec.image,
        "command": _command(spec, head),
        "env": _environment(spec),
        "resources": _resources(spec, options),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {
                "drop": ["ALL"],
                **({"add": list(options.capabilities)} if options.capabilities else {}),
            },
        },
        # The end of a log that failed, where only the pod's status is left.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": name, **mount} for name, _, mount in volumes],
    }
    if options.secret_environment:
        container["envFrom"] = [{"secretRef": {"name": n}} for n in options.secret_environment]
    if spec.working_directory is not None:
        container["workingDir"] = spec.working_directory
    if spec.resources.nodes > 1:
        container["ports"] = [{"name": "rendezvous", "containerPort": PORT}]
    if spec.has_ranks:
        told = {"command": ["/bin/sh", "-c", SAVE_FIRST.strip()]}
        container["lifecycle"] = {"preStop": {"exec": told}}
    return container


def _command(spec: LaunchSpec, head: str) -> list[str]:
    words = [_literal(word) for word in spec.command]
    if spec.shares is not None:
        words += ["--world-size", str(spec.shares.count)]
        if spec.shares.only:
            return _begun_anew(words, ONE_OF_THEM)
        return _begun_anew([*words, "--rank", f"$({INDEX})"])
    wanted = spec.resources
    if spec.has_ranks:
        words = [*map(_literal, spec.rank_launcher), *_meeting(wanted, head), *words]
    return _begun_anew(words) if wanted.nodes == 1 else words


def _meeting(wanted: Resources, head: str) -> list[str]:
    """How ranks find each other, for torchrun."""
    meeting = [f"--nproc-per-node={wanted.processes_per_node}", "--max-restarts=0", "--no-python"]
    if wanted.nodes == 1:
        return ["--standalone", *meeting]
    address = [f"--master-addr={head}", f"--master-port={PORT}"]
    return [f"--nnodes={wanted.nodes}", f"--node-rank=$({INDEX})", *address, *meeting]


def _begun_anew(words: list[str], first: str = "") -> list[str]:
    script = _literal((first.rstrip() + BEGIN_ANEW).strip())
    return ["/bin/sh", "-c", script, "stage", *words]


def _literal(word: str) -> str:
    """As it is: Kubernetes replaces $(NAME) in commands and variables, and $$ means $."""
    return word.replace("$", "$$")


def _environment(spec: LaunchSpec) -> list[Document]:
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}}
    run, shares = _literal(spec.run_directory), {}
    if spec.shares is not None and spec.shares.only:
        shares = {SHARES: " ".join(map(str, spec.shares.indices))}
    elif spec.shares is not None:
        run = f"{run}/share-$({INDEX})"
    given: Mapping[str, str] = {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        **{name: _literal(value) for name, value in spec.environment.items()},
        **shares,
        "TRAINYARD_RUN_DIR": run,
    }
    return [
        {"name": INDEX, "valueFrom": index},
        *({"name": name, "value": value} for name, value in given.items()),
    ]


def _resources(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    wanted, limits, requests = spec.resources, {}, {}
    if wanted.cpus_per_node is not None:
        requests["cpu"] = str(wanted.cpus_per_node)  # no limit: throttled ranks stall all others
    if wanted.memory_bytes_per_node is not None:
        limits["memory"] = f"{math.ceil(wanted.memory_bytes_per_node / MIB)}Mi"
    if wanted.gpus_per_node:
        limits[options.gpu_resource] = str(wanted.gpus_per_node)
    limits |= dict(options.extra_resources)
    return {"requests": {**requests, **limits}, "limits": limits}


def _volumes(
    spec: LaunchSpec, options: KubernetesOptions
) -> Iterator[tuple[str, Document, Document]]:
    """Name, what it is, and where it is mounted."""
    memory = {"medium": "Memory", "sizeLimit": options.shared_memory}
    yield "shared-memory", {"emptyDir": memory}, {"mountPath": "/dev/shm"}
    temporary = {"sizeLimit": options.temporary_size}
    yield "temporary", {"emptyDir": temporary}, {"mountPath": "/tmp"}
    for number, claim in enumerate(options.claims):
        source = {"claimName": claim.name}
        mount = {"mountPath": claim.target, "readOnly": claim.read_only}
        yield f"claim-{number}", {"persistentVolumeClaim": source}, mount
    for number, one in enumerate(spec.mounts):
        host = {"path": one.source, "type": "Directory"}
        mount = {"mountPath": one.target, "readOnly": one.read_only}
        yield f"host-{number}", {"hostPath": host}, mount
