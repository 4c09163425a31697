"""A job as manifests for Kubernetes: an Indexed Job with a headless Service, or a JobSet.

Pure: a LaunchSpec and options in, documents out. Each pod of a job is a node; its rank is the pod's
completion index, and ranks meet at pod 0, which the Service names. A share is a pod too. The
cluster retries nothing: the flow decides what an end means."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from flows.backends.kubernetes.options import KubernetesOptions, Toleration
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError

Document = dict[str, Any]

CONTAINER = "stage"
PORT = 29500
INDEX = "YARD_INDEX"
"""Variable with the completion index of the pod."""
SHARES = "YARD_SHARES"
"""Variable with the shares to make, if these are not all: the N-th is that of index N."""
RENDEZVOUS_ID = "PET_RDZV_ID"
"""Variable that torchrun reads as --rdzv-id."""
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
"""preStop hook: ranks save before SIGTERM. torchrun would kill them after 30 s; this gives them the
whole grace, whether the pod is preempted, drained or deleted."""

CHOOSE_SHARE = """
position=0
for share in $YARD_SHARES; do
  [ "$position" -eq "$YARD_INDEX" ] && break
  position=$((position + 1))
done
export TRAINYARD_RUN_DIR="$TRAINYARD_RUN_DIR/share-$share"
set -- "$@" --rank "$share"
"""
"""Maps a completion index, which counts from 0 without gaps, to one of the shares to make."""

START_OVER = """
rm -f "$TRAINYARD_RUN_DIR/failure.json" "$TRAINYARD_RUN_DIR/outcome.json"
if ! command -v "$1" >/dev/null; then
  echo "$1: the image has no such program; correct the image or the python of the yard" >&2
  exit 2
fi
exec "$@"
"""
"""Start of a pod that works alone: it may replace a preempted pod that left a report. Pods of
several nodes do not run this: they are not replaced, and one may already have written a report."""

KEY_LABEL = "trainyard/key"
"""Label by which a submission is found again."""
NOT_RETRIED = (1, 2, 70)
"""Exit statuses that a retry cannot help: data, options, defects."""
JOBSET = "jobset.x-k8s.io/v1alpha2"
REPLICATED = "nodes"
MAX_NAME = 63 - len(f"-{REPLICATED}-0-99999-abcde")
"""Length of a job's name. Pods append their index, and JobSet more, to get a host name, which must
be a DNS label."""
MANIFESTS = "job.yaml"
"""File of a run folder with what was submitted; `kubectl create -f` runs it by hand."""


def render_kubernetes(
    spec: LaunchSpec, options: KubernetesOptions, rendezvous_id: str = ""
) -> list[Document]:
    """The manifests in order of creation; ConfigError for a job that cannot run on Kubernetes.

    rendezvous_id: under which the ranks of several nodes meet; random for a job that will run."""
    _check(spec, options)
    if rendezvous_id and spec.has_ranks and spec.resources.nodes > 1:
        meeting = {**spec.environment, RENDEZVOUS_ID: rendezvous_id}
        spec = replace(spec, environment=meeting)
    if options.variant == "jobset" and spec.shares is None:
        return [_jobset(spec, options)]
    job = _job(spec, options)
    return [_service(spec, options), job] if spec.resources.nodes > 1 else [job]


def resource_name(spec: LaunchSpec) -> str:
    """The name in the cluster: DNS-1035, unique to this submission, short enough for pods."""
    start = re.sub(r"[^a-z0-9]+", "-", spec.name).strip("-")
    if not start[0].isalpha():  # a Service must not begin with a digit
        start = f"j{start}"
    room = MAX_NAME - len(f"-{spec.key}")
    if len(start) > room:
        digest = hashlib.sha256(start.encode()).hexdigest()[:6]
        start = f"{start[: max(0, room - 7)].rstrip('-') or 'j'}-{digest}"[:room].rstrip("-")
    return f"{start}-{spec.key}"


def _check(spec: LaunchSpec, options: KubernetesOptions) -> None:
    if not spec.key:
        raise ConfigError(f"job {spec.name}: Kubernetes needs a key by which the job is found")
    if spec.image is None:
        raise ConfigError(f"job {spec.name}: Kubernetes runs images, and none is given")
    targets = [claim.target for claim in options.claims] + [m.target for m in spec.mounts]
    run = PurePosixPath(spec.run_directory)
    if not any(run.is_relative_to(target) for target in targets):
        raise ConfigError(
            f"run folder {spec.run_directory} is on no volume of the pods "
            f"({', '.join(targets) or 'they have none'}); name the yard's claim in the Kubernetes "
            f"option claims"
        )


# --- documents ----------------------------------------------------------------------------------


def _labels(spec: LaunchSpec) -> dict[str, str]:
    component = re.sub(r"[^A-Za-z0-9]+$", "", spec.name[:63])
    return {
        "app.kubernetes.io/name": "trainyard",
        "app.kubernetes.io/component": component,
        KEY_LABEL: spec.key,
    }


def _metadata(spec: LaunchSpec, options: KubernetesOptions, queue: str | None = None) -> Document:
    """queue: only of the whole job; pods with that label would be queued one by one."""
    labels = _labels(spec)
    if queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = queue
    return {"name": resource_name(spec), "namespace": options.namespace, "labels": labels}


def _service(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, options),
        "spec": {
            "clusterIP": "None",
            # Pods resolve each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {KEY_LABEL: spec.key},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    name = resource_name(spec)
    head = f"{name}-0.{name}"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec, options, options.queue),
        "spec": {
            **_job_spec(spec, options, head, subdomain=name),
            "ttlSecondsAfterFinished": options.keep_seconds,
            **({} if options.queue is None else {"suspend": True}),
        },
    }


def _jobset(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    """JobSet's controller creates the Service, and names pods SET-JOB-0-INDEX."""
    name = resource_name(spec)
    head = f"{name}-{REPLICATED}-0-0.{name}"
    job = _job_spec(spec, options, head, subdomain=None)
    template = {"metadata": {"labels": _labels(spec)}, "spec": job}
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": _metadata(spec, options, options.queue),
        "spec": {
            "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": template}],
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": options.keep_seconds,
            **({} if options.queue is None else {"suspend": True}),
        },
    }


def _job_spec(
    spec: LaunchSpec, options: KubernetesOptions, head: str, subdomain: str | None
) -> Document:
    # Shares have the limit in their pod: the Job takes as long as all of them in turn.
    limit = spec.resources.time_limit_seconds if spec.shares is None else None
    nodes = spec.resources.nodes
    counts = {"completions": nodes, "parallelism": nodes, "backoffLimit": 0}
    if spec.shares is not None:
        count = len(spec.shares.indices)
        at_once = min(count, spec.shares.at_once or count)
        # A failed share leaves the others running; the job fails when all have ended.
        counts = {"completions": count, "parallelism": at_once, "backoffLimitPerIndex": 0}
    return {
        "completionMode": "Indexed",
        **counts,
        **({} if limit is None else {"activeDeadlineSeconds": limit}),
        # A pod that is being deleted may still write: its replacement waits for its end.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": list(_failure_rules(spec))},
        "template": {
            "metadata": {"labels": _labels(spec)},
            "spec": _pod(spec, options, head, subdomain),
        },
    }


def _failure_rules(spec: LaunchSpec) -> Iterator[Document]:
    """The first rule that matches a pod's end decides; the Job's condition names it.

    A preempted pod that works alone is replaced. A job of several nodes fails as a whole, with
    `DisruptionTarget` in its message, and is submitted again."""
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    is_alone = spec.resources.nodes == 1
    yield {"action": "Ignore" if is_alone else "FailJob", "onPodConditions": disrupted}
    action = "FailIndex" if spec.shares is not None else "FailJob"
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(NOT_RETRIED)}
    yield {"action": action, "onExitCodes": codes}


# --- pods ---------------------------------------------------------------------------------------


def _pod(
    spec: LaunchSpec, options: KubernetesOptions, head: str, subdomain: str | None
) -> Document:
    """The specification of a job's pods.

    head: DNS name of pod 0; subdomain: the Service that names pods."""
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
    value = {"operator": "Exists"} if one.value is None else {"operator": "Equal"}
    if one.value is not None:
        value["value"] = one.value
    return {"key": one.key, **value, **({"effect": one.effect} if one.effect else {})}


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
        # Keeps the end of a failed log in the pod's status.
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
        save = {"command": ["/bin/sh", "-c", SAVE_FIRST.strip()]}
        container["lifecycle"] = {"preStop": {"exec": save}}
    return container


def _command(spec: LaunchSpec, head: str) -> list[str]:
    words = [_literal(word) for word in spec.command]
    if spec.shares is not None:
        words += ["--world-size", str(spec.shares.count)]
        if spec.shares.only:
            return _in_shell(words, CHOOSE_SHARE)
        return _in_shell([*words, "--rank", f"$({INDEX})"])
    nodes = spec.resources.nodes
    if spec.has_ranks:
        per_node = f"--nproc-per-node={spec.resources.processes_per_node}"
        meeting = ["--standalone"]
        if nodes > 1:
            address = [f"--master-addr={head}", f"--master-port={PORT}"]
            meeting = [f"--nnodes={nodes}", f"--node-rank=$({INDEX})", *address]
        launcher = [*map(_literal, spec.rank_launcher), *meeting]
        words = [*launcher, per_node, "--max-restarts=0", "--no-python", *words]
    return _in_shell(words) if nodes == 1 else words


def _in_shell(words: list[str], first: str = "") -> list[str]:
    script = _literal((first.rstrip() + START_OVER).strip())
    return ["/bin/sh", "-c", script, "stage", *words]


def _literal(word: str) -> str:
    """Escaped: Kubernetes expands $(NAME) in commands and variables, and $$ means $."""
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
        requests["cpu"] = str(wanted.cpus_per_node)  # no limit: a throttled rank stalls all others
    if wanted.memory_bytes_per_node is not None:
        limits["memory"] = f"{math.ceil(wanted.memory_bytes_per_node / MIB)}Mi"
    if wanted.gpus_per_node:
        limits[options.gpu_resource] = str(wanted.gpus_per_node)
    limits |= dict(options.extra_resources)
    return {"requests": {**requests, **limits}, "limits": limits}


def _volumes(
    spec: LaunchSpec, options: KubernetesOptions
) -> Iterator[tuple[str, Document, Document]]:
    """Name, source and mount."""
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
