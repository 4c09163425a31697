"""The slots of a yard's limits, where each belongs to something that runs.

One that belongs to nothing is never given back: the stage or flow that it limits waits for ever."""

from __future__ import annotations

import asyncio

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
    TaskRunFilterTags,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError

from flows.doctor.check import Answer, Check, ok, skipped, warn
from flows.doctor.yard import Yard
from flows.runner.limits import Slots, slots_of, told
from flows.runner.tags import limit_tag
from trainyard.errors import InfrastructureError

PAGE = 200

AT_WORK = [StateType.RUNNING, StateType.CANCELLING]
BUSY = [*AT_WORK, StateType.PENDING]
"""A flow run that waits for a worker has the slot of its deployment."""


def slots(yard: Yard) -> Answer:
    """No slot of a limit is taken for nothing."""
    try:
        return asyncio.run(_slots(yard))
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise InfrastructureError(f"limits cannot be read from the server: {error}") from error


async def _slots(yard: Yard) -> Answer:
    tags = [limit_tag(yard.place.yard, stage) for stage in yard.place.limited]
    async with get_client() as client:
        read = [(tag, await slots_of(client, tag)) for tag in tags]
        found = [(tag, limit) for tag, limit in read if limit is not None]
        ill = [await _lost(client, tag, limit) for tag, limit in found if limit.unleased]
        ill += await _lost_of_deployments(client, yard.profile.name)
    if ill:
        commands = " && ".join(command for _, command in ill)
        return warn(
            "; ".join(said for said, _ in ill), f"if it is so a minute later as well: {commands}"
        )
    if not found:
        return skipped(f"no limit of yard {yard.profile.name} is registered")
    return ok(", ".join(limit.counted for _, limit in found))


Lost = tuple[str, str]
"""What is wrong, and the command that mends it."""


async def _lost(client: PrefectClient, tag: str, limit: Slots) -> Lost:
    """Slots without a lease; a task that runs may have one whose lease the server forgot."""
    running = await client.read_task_runs(
        task_run_filter=TaskRunFilter(
            tags=TaskRunFilterTags(all_=[tag]),
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=AT_WORK)),
        ),
        limit=PAGE,
    )
    others = tuple(run.id for run in running if run.id not in limit.holders)
    said = f"{limit.counted}, {limit.unleased} of them by nothing that has a lease"
    if others:
        said += f" (look whether it runs: {await told(client, others[:3])})"
    return said, limit.freeing


async def _lost_of_deployments(client: PrefectClient, yard: str) -> list[Lost]:
    """Those of flows of which one runs at a time."""
    ours = DeploymentFilter(name=DeploymentFilterName(any_=[yard]))
    lost = []
    for deployment in await client.read_deployments(deployment_filter=ours, limit=PAGE):
        limit = deployment.global_concurrency_limit
        if limit is None or not limit.active_slots:
            continue
        runs = await client.read_flow_runs(
            deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}}),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=BUSY))
            ),
            limit=PAGE,
        )
        if limit.active_slots > len(runs):
            flow = await client.read_flow(deployment.flow_id)
            said = f"{limit.active_slots} of {limit.limit} slots of {flow.name}/{yard} taken, and "
            command = f"prefect gcl update {limit.name} --active-slots {len(runs)}"
            lost.append((f"{said}{len(runs)} of its runs at work", command))
    return lost


CHECKS = (Check("slots", slots, "slots-that-nobody-has", ("Prefect", "versions")),)
