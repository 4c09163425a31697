"""Checks of a Kubernetes cluster, through the client of the Kubernetes backend."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.job import variant_to_make
from flows.backends.kubernetes.manifests import render_kubernetes
from flows.doctor.check import CheckResult, fail, ok, skipped
from flows.doctor.context import YardContext
from flows.doctor.ranks import probe_job
from trainyard.errors import ConfigError, InfrastructureError

T = TypeVar("T")

PATIENCE_SECONDS = 2.0
SECONDS = 12.0
"""Limit of the cluster's answers, after the client is loaded."""
CLIENT = ("kubernetes.aio.client", "kubernetes.aio.config")
LISTED = ("Job", "Pod", "Event")
"""Kinds that the backend lists; the role in deploy/kubernetes does not allow to list Services."""


def cluster_jobs(yard: YardContext) -> CheckResult:
    """The API server answers, accepts our credentials, and would accept a job."""
    options = yard.site.options_of("pretrain")
    kind = asyncio.run(_bounded(yard, lambda client: _try_all(client, yard)))
    return ok(f"the API server answers; namespace {options.namespace} accepts a {kind}")


async def _try_all(client: KubernetesClient, yard: YardContext) -> str:
    """Create a job as a dry run; returns its kind. Listing alone proves nothing: a namespace that
    does not exist lists as empty."""
    options, job = yard.site.options_of("pretrain"), probe_job(yard)
    variant = await variant_to_make(client, options, job.resources.nodes)
    for kind in (*LISTED, "JobSet") if variant == "jobset" else LISTED:
        await client.find(kind, "doctor")
    # Without an image the check of the image fails, not this one.
    job = replace(job, image=job.image or "none")
    documents = render_kubernetes(job, replace(options, variant=variant))
    for document in documents:
        await client.create(document, is_trial=True)
    return str(documents[-1]["kind"])


def cluster_image(yard: YardContext) -> CheckResult:
    """The profile names an image. Only the nodes know whether they can fetch it."""
    if yard.site.image is None and not yard.site.images_by_stage:
        todo = 'image = "REGISTRY/trainyard/pretrain:VERSION" in the yard\'s profile'
        return fail(ConfigError, "the profile names no image", todo)
    return skipped(f"the nodes fetch {yard.site.image}; --submit tries it")


async def _bounded(yard: YardContext, question: Callable[[KubernetesClient], Awaitable[T]]) -> T:
    """Ask the cluster, within `SECONDS`."""
    for name in CLIENT:  # on a busy machine this takes longer than SECONDS
        importlib.import_module(name)
    options = yard.site.options_of("pretrain")
    client = KubernetesClient(
        options.namespace, options.kubeconfig, options.context, patience_seconds=PATIENCE_SECONDS
    )
    try:
        async with asyncio.timeout(SECONDS):
            await client.open()
            return await question(client)
    except TimeoutError as error:
        raise InfrastructureError(
            f"the API server of Kubernetes does not answer within {SECONDS:.0f} s; check "
            "KUBECONFIG, the VPN and firewalls"
        ) from error
    finally:
        await client.close()
