"""A Kubernetes cluster, by the client of its job block."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from flows.blocks.kubernetes_client import KubernetesClient
from flows.doctor.check import Answer, fail, ok, skipped
from flows.doctor.yard import Yard
from trainyard.errors import ConfigError, InfrastructureError

T = TypeVar("T")

PATIENCE_SECONDS = 2.0
SECONDS = 12.0
NEEDED = ("Job", "Pod", "Service", "Event")
"""What a job block lists all the time."""


def cluster_jobs(yard: Yard) -> Answer:
    """The API server answers, knows us, and lets us look at what a job is made of."""
    options = yard.place.options_of("pretrain")
    has_jobsets = asyncio.run(_bounded(yard, _look_at_all))
    told = f"the API server answers; namespace {options.namespace}"
    if options.variant == "jobset" and not has_jobsets:
        todo = 'install the JobSet controller, or set variant = "job" in the yard\'s [kubernetes]'
        return fail(ConfigError, f"{told}; JobSet is not installed", todo)
    return ok(f"{told}{', JobSet is installed' if has_jobsets else ''}")


async def _look_at_all(client: KubernetesClient) -> bool:
    for kind in NEEDED:
        await client.find(kind, "doctor")
    return await client.serves_jobsets()


def cluster_image(yard: Yard) -> Answer:
    """Nodes fetch images, and nobody else knows whether they can."""
    if yard.place.image is None and not yard.place.images_by_stage:
        todo = 'image = "REGISTRY/trainyard/pretrain:VERSION" in the yard\'s profile'
        return fail(ConfigError, "the yard names no image", todo)
    return skipped(f"{yard.place.image} is fetched by the nodes; --submit tries it")


async def _bounded(yard: Yard, question: Callable[[KubernetesClient], Awaitable[T]]) -> T:
    """Put questions to the cluster, within seconds."""
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


def _client(yard: Yard) -> KubernetesClient:
    options = yard.place.options_of("pretrain")
    return KubernetesClient(
        options.namespace, options.kubeconfig, options.context, patience_seconds=PATIENCE_SECONDS
    )
