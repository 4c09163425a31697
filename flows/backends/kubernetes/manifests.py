"""A job as manifests for Kubernetes: an Indexed Job with a headless Service, or a JobSet.

Pure: a LaunchSpec and a cluster's options in, documents out. Every pod of a job is a node: its rank
is the pod's completion index, and the pods meet at pod 0, which the Service gives a name. A share
is a pod too. Nothing is tried again by the cluster: what an end means is for whoever submitted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from flows.backends.kubernetes.options import KubernetesOptions
from flows.backends.kubernetes.pod import CONTAINER, PORT, Document, render_pod
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError

KEY_LABEL = "trainyard/key"
"""What a submission is found again by."""
PERSONS_FAULT = (1, 2, 70)
"""Exit statuses that nobody mends by trying again: data, options, defects."""
JOBSET = "jobset.x-k8s.io/v1alpha2"
REPLICATED = "nodes"
MAX_NAME = 63 - len(f"-{REPLICATED}-0-99999-abcde")
"""Of a job: a pod's host name is that and its index, and is a DNS label. A JobSet is refused whose
pods' names, which have more in them, would be longer than one."""
MANIFESTS = "job.yaml"
"""File of a run folder with what was submitted: `kubectl create -f` runs it by hand."""


def render_kubernetes(spec: LaunchSpec, options: KubernetesOptions) -> list[Document]:
    """The manifests, in the order in which they are created; ConfigError for what cannot be."""
    _check(spec, options)
    if options.variant == "jobset" and spec.shares is None:
        return [_jobset(spec, options)]
    job = _job(spec, options)
    return [_service(spec, options), job] if spec.resources.nodes > 1 else [job]


def resource_name(spec: LaunchSpec) -> str:
    """The name in the cluster: DNS-1035, of this submission alone, with room for what pods add."""
    start = re.sub(r"[^a-z0-9]+", "-", spec.name).strip("-")
    if not start[0].isalpha():  # a Service must not begin with a digit
        start = f"j{start}"
    room = MAX_NAME - len(f"-{spec.key}")
    if len(start) > room:
        told = hashlib.sha256(start.encode()).hexdigest()[:6]
        start = f"{start[: max(0, room - 7)].rstrip('-') or 'j'}-{told}"[:room].rstrip("-")
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
            f"run folder {spec.run_directory} lies on no volume of the pods "
            f"({', '.join(targets) or 'there are none'}); name the yard's claim in the Kubernetes "
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


def _of_queue(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    """The metadata of what is queued as a whole: pods of it that bore the label, too, would be
    queued each for itself."""
    queue = {} if options.queue is None else {"kueue.x-k8s.io/queue-name": options.queue}
    labels = {**_labels(spec), **queue}
    return {"name": resource_name(spec), "namespace": options.namespace, "labels": labels}


def _service(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    name, labels = resource_name(spec), _labels(spec)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": options.namespace, "labels": labels},
        "spec": {
            "clusterIP": "None",
            # Pods look for each other before any of them is ready.
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
        "metadata": _of_queue(spec, options),
        "spec": {
            **_job_spec(spec, options, head, subdomain=name),
            "ttlSecondsAfterFinished": options.keep_seconds,
            **({} if options.queue is None else {"suspend": True}),
        },
    }


def _jobset(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    """JobSet's controller makes the Service, and names pods SET-JOB-0-INDEX."""
    name = resource_name(spec)
    head = f"{name}-{REPLICATED}-0-0.{name}"
    job = _job_spec(spec, options, head, subdomain=None)
    template = {"metadata": {"labels": _labels(spec)}, "spec": job}
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": _of_queue(spec, options),
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
    # That of a share is its pod's: the whole Job takes as long as all shares do, one after another.
    limit = spec.resources.time_limit_seconds if spec.shares is None else None
    return {
        "completionMode": "Indexed",
        **_counts(spec),
        **({} if limit is None else {"activeDeadlineSeconds": limit}),
        # A pod that is being deleted may still write: its successor waits for its end.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": list(_failure_rules(spec))},
        "template": {
            "metadata": {"labels": _labels(spec)},
            "spec": render_pod(spec, options, head, subdomain),
        },
    }


def _counts(spec: LaunchSpec) -> Document:
    if spec.shares is None:
        nodes = spec.resources.nodes
        return {"completions": nodes, "parallelism": nodes, "backoffLimit": 0}
    count = len(spec.shares.indices)
    at_once = min(count, spec.shares.at_once or count)
    # The other shares go on when one fails; the job fails when all of them have ended.
    return {"completions": count, "parallelism": at_once, "backoffLimitPerIndex": 0}


def _failure_rules(spec: LaunchSpec) -> Iterator[Document]:
    """The first rule that fits a pod's end decides, and the Job's condition tells which it was.

    A share that was preempted is made again by itself. Of a job of several nodes the others have
    lost their partner: it fails as a whole, with `DisruptionTarget` in its message, and is
    submitted again."""
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    is_alone = spec.resources.nodes == 1
    yield {"action": "Ignore" if is_alone else "FailJob", "onPodConditions": disrupted}
    action = "FailIndex" if spec.shares is not None else "FailJob"
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(PERSONS_FAULT)}
    yield {"action": action, "onExitCodes": codes}
