"""A Kubernetes cluster, by the client of its job block."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.job import variant_to_make
from flows.backends.kubernetes.manifests import render_kubernetes
from flows.doctor.check import Answer, fail, ok, skipped
from flows.doctor.context import YardContext
from flows.doctor.ranks import probe_job
from trainyard.errors import ConfigError, InfrastructureError

T = TypeVar("T")

PATIENCE_SECONDS = 2.0
SECONDS = 12.0
"""The cluster has so long to answer, from when the client is loaded."""
CLIENT = ("kubernetes.aio.client", "kubernetes.aio.config")
LISTED = ("Job", "Pod", "Event")
"""What a job block lists all the time; the role in deploy/kubernetes lets it list no Service."""


def cluster_jobs(yard: YardContext) -> Answer:
    """The API server answers, knows us, and would take a job of ours."""
    options = yard.place.options_of("pretrain")
    kind = asyncio.run(_bounded(yard, lambda client: _try_all(client, yard)))
    return ok(f"the API server answers; namespace {options.namespace} would take a {kind}")


async def _try_all(client: KubernetesClient, yard: YardContext) -> str:
    """The kind of the job that would be taken. Lists of a namespace that is not there are empty and
    no error, so the job is shown to the cluster, which keeps nothing of it."""
    options, job = yard.place.options_of("pretrain"), probe_job(yard)
    variant = await variant_to_make(client, options, job.resources.nodes)
    for kind in (*LISTED, "JobSet") if variant == "jobset" else LISTED:
        await client.find(kind, "doctor")
    # That the yard names no image is for the check of the image to say.
    job = replace(job, image=job.image or "none")
    documents = render_kubernetes(job, replace(options, variant=variant))
    for document in documents:
        await client.create(document, is_trial=True)
    return str(documents[-1]["kind"])


def cluster_image(yard: YardContext) -> Answer:
    """Nodes fetch images, and nobody else knows whether they can."""
    if yard.place.image is None and not yard.place.images_by_stage:
        todo = 'image = "REGISTRY/trainyard/pretrain:VERSION" in the yard\'s profile'
        return fail(ConfigError, "the yard names no image", todo)
    return skipped(f"{yard.place.image} is fetched by the nodes; --submit tries it")


async def _bounded(yard: YardContext, question: Callable[[KubernetesClient], Awaitable[T]]) -> T:
    """Put questions to the cluster, within seconds."""
    for name in CLIENT:  # a busy machine takes longer for it than a cluster may for an answer
        importlib.import_module(name)
    client = _client(yard)
    try:
        async with asyncio.timeout(SECONDS):
            await client.open()
            return await question(client)
    except TimeoutError as error:
        raise InfrastructureError(
            f"the API server of Kubernetes does not answer within {SECONDS:.0f} s; is KUBECONFIG "
            "that of this cluster, and does a firewall or VPN stand in between?"
        ) from error
    finally:
        await client.close()


def _client(yard: YardContext) -> KubernetesClient:
    options = yard.place.options_of("pretrain")
    return KubernetesClient(
        options.namespace, options.kubeconfig, options.context, patience_seconds=PATIENCE_SECONDS
    )
