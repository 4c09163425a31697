"""A job as manifests for Kubernetes: an Indexed Job with a headless Service, or a JobSet.

Pure: a LaunchSpec and a cluster's options in, documents out. Every pod of a job is a node: its rank
is the pod's completion index, and the pods meet at pod 0, which the Service gives a name. A share
is a pod too. Nothing is tried again by the cluster: what an end means is for whoever submitted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from flows.launch.kubernetes_options import KubernetesOptions
from flows.launch.kubernetes_pod import CONTAINER, PORT, Document, render_pod
from flows.launch.spec import LaunchSpec
from trainyard.errors import ConfigError

KEY_LABEL = "trainyard/key"
"""What a submission is found again by."""
PERSONS_FAULT = (1, 2, 70)
"""Exit statuses that nobody mends by trying again: data, options, defects."""
MAX_NAME = 63 - len("-99999")
"""Of a job: a pod's host name is that and its index, and is a DNS label."""
JOBSET = "jobset.x-k8s.io/v1alpha2"
REPLICATED = "nodes"
MANIFESTS = "job.yaml"
"""File of a run folder with what was submitted: `kubectl create -f` runs it by hand."""
LOG = "log.txt"


def render_kubernetes(spec: LaunchSpec, options: KubernetesOptions) -> list[Document]:
    """The manifests, in the order in which they are created; ConfigError for what cannot be."""
    _check(spec, options)
    if spec.shares is not None and spec.shares.only:
        # Completion indices count from 0 without gaps, so each of these is a job of its own.
        return [_job(spec, options, share) for share in spec.shares.indices]
    if options.variant == "jobset" and spec.shares is None:
        return [_jobset(spec, options)]
    job = _job(spec, options)
    return [_service(spec, options), job] if spec.resources.nodes > 1 else [job]


def log_name(share: int | None) -> str:
    """File of a run folder with the output of the job, or of one of its shares."""
    return LOG if share is None else f"log-{share:05d}.txt"


def share_folder(share: int | None) -> str:
    """Folder, relative to the run folder, of a share's own reports; empty for a whole job."""
    return "" if share is None else f"share-{share}"


def resource_name(spec: LaunchSpec, share: int | None = None) -> str:
    """The name in the cluster: DNS-1123, of this submission alone, never longer than a label."""
    ending = spec.key if share is None else f"{spec.key}-{share}"
    start = re.sub(r"[^a-z0-9]+", "-", spec.name).strip("-")
    if len(start) + 1 + len(ending) > MAX_NAME:
        told = hashlib.sha256(start.encode()).hexdigest()[:6]
        start = f"{start[: MAX_NAME - len(ending) - 8].rstrip('-')}-{told}"
    if not start[0].isalpha():  # a Service must not begin with a digit
        start = f"j{start}"[: MAX_NAME - len(ending) - 1]
    return f"{start}-{ending}"


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


def _metadata(spec: LaunchSpec, options: KubernetesOptions, name: str) -> Document:
    return {"name": name, "namespace": options.namespace, "labels": _labels(spec, options)}


def _labels(spec: LaunchSpec, options: KubernetesOptions) -> dict[str, str]:
    component = re.sub(r"[^A-Za-z0-9]+$", "", spec.name[:63])
    queue = {} if options.queue is None else {"kueue.x-k8s.io/queue-name": options.queue}
    return {
        "app.kubernetes.io/name": "trainyard",
        "app.kubernetes.io/component": component,
        KEY_LABEL: spec.key,
        **queue,
    }


def _service(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    name = resource_name(spec)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, options, name),
        "spec": {
            "clusterIP": "None",
            # Pods look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {KEY_LABEL: spec.key},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(spec: LaunchSpec, options: KubernetesOptions, share: int | None = None) -> Document:
    name = resource_name(spec, share)
    head = f"{name}-0.{name}"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec, options, name),
        "spec": {
            **_job_spec(spec, options, head, share, subdomain=name),
            "ttlSecondsAfterFinished": options.keep_seconds,
            **({} if options.queue is None else {"suspend": True}),
        },
    }


def _jobset(spec: LaunchSpec, options: KubernetesOptions) -> Document:
    """JobSet's controller makes the Service, and names pods SET-JOB-0-INDEX."""
    name = resource_name(spec)
    head = f"{name}-{REPLICATED}-0-0.{name}"
    job = _job_spec(spec, options, head, None, subdomain=None)
    template = {"metadata": {"labels": _labels(spec, options)}, "spec": job}
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": _metadata(spec, options, name),
        "spec": {
            "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": template}],
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": options.keep_seconds,
            **({} if options.queue is None else {"suspend": True}),
        },
    }


def _job_spec(
    spec: LaunchSpec,
    options: KubernetesOptions,
    head: str,
    share: int | None,
    subdomain: str | None,
) -> Document:
    limit = spec.resources.time_limit_seconds
    return {
        "completionMode": "Indexed",
        **_counts(spec, share),
        **({} if limit is None else {"activeDeadlineSeconds": limit}),
        # A pod that is being deleted may still write: its successor waits for its end.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": list(_failure_rules(spec, share))},
        "template": {
            "metadata": {"labels": _labels(spec, options)},
            "spec": render_pod(spec, options, head, share, subdomain),
        },
    }


def _counts(spec: LaunchSpec, share: int | None) -> Document:
    if share is not None:
        return {"completions": 1, "parallelism": 1, "backoffLimit": 0}
    if spec.shares is None:
        nodes = spec.resources.nodes
        return {"completions": nodes, "parallelism": nodes, "backoffLimit": 0}
    count = spec.shares.count
    at_once = min(count, spec.shares.at_once or count)
    # The other shares go on when one fails; the job fails when all of them have ended.
    return {"completions": count, "parallelism": at_once, "backoffLimitPerIndex": 0}


def _failure_rules(spec: LaunchSpec, share: int | None) -> Iterator[Document]:
    """The first rule that fits a pod's end decides, and the Job's condition tells which it was.

    A share that was preempted is made again by itself. Of a job of several nodes the others have
    lost their partner: it fails as a whole, with `DisruptionTarget` in its message, and is
    submitted again."""
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    is_alone = spec.resources.nodes == 1
    yield {"action": "Ignore" if is_alone else "FailJob", "onPodConditions": disrupted}
    action = "FailIndex" if spec.shares is not None and share is None else "FailJob"
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(PERSONS_FAULT)}
    yield {"action": action, "onExitCodes": codes}
