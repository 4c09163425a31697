"""Checks that every used slot of a yard's limits belongs to a run.

A slot without an owner is never released, so stages or flows under its limit wait forever."""

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
    TaskRunFilterName,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError

from flows.doctor.check import Check, CheckResult, ok, skipped, warn
from flows.doctor.context import YardContext
from flows.runner.limits import Slots, describe_task_runs, read_slots
from flows.yard.profile import limit_tag
from trainyard.errors import InfrastructureError

PAGE = 200

AT_WORK = [StateType.RUNNING, StateType.CANCELLING]
BUSY = [*AT_WORK, StateType.PENDING]
"""A flow run that waits for a worker has the slot of its deployment."""

Lost = tuple[str, str]
"""A message, and the command that frees the slots."""


def slots(yard: YardContext) -> CheckResult:
    """Every used slot of a limit belongs to a run."""
    try:
        return asyncio.run(_slots(yard))
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise InfrastructureError(f"limits cannot be read from the server: {error}") from error


async def _slots(yard: YardContext) -> CheckResult:
    found, lost = [], []
    async with get_client() as client:
        for stage in yard.site.limited:
            limit = await read_slots(client, limit_tag(yard.site.yard, stage))
            if limit is not None:
                found.append(limit)
                if limit.unleased:
                    lost.append(await _lost_of_stage(client, stage, limit))
        lost += await _lost_of_deployments(client, yard.profile.name)
    if lost:
        commands = " && ".join(command for _, command in lost)
        message = "; ".join(message for message, _ in lost)
        return warn(message, f"if it is so a minute later as well: {commands}")
    if not found:
        return skipped(f"no limit of yard {yard.profile.name} is registered")
    return ok(", ".join(limit.counts for limit in found))


async def _lost_of_stage(client: PrefectClient, stage: str, limit: Slots) -> Lost:
    """Slots of a stage without a lease. If the server lost a lease, a running task may own one."""
    running = await client.read_task_runs(
        task_run_filter=TaskRunFilter(
            name=TaskRunFilterName(like_=stage),
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=AT_WORK)),
        ),
        limit=PAGE,
    )
    others = tuple(run.id for run in running if run.id not in limit.holders)
    message = f"{limit.counts}, {limit.unleased} of them by nothing that has a lease"
    if others:
        message += f" (look whether it runs: {await describe_task_runs(client, others[:3])})"
    return message, limit.free_command


async def _lost_of_deployments(client: PrefectClient, yard: str) -> list[Lost]:
    """Slots without a run, of flows that run one at a time."""
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
            message = f"{limit.active_slots} of {limit.limit} slots of {flow.name}/{yard} in use, "
            command = f"prefect gcl update {limit.name} --active-slots {len(runs)}"
            lost.append((f"{message}and {len(runs)} of its runs at work", command))
    return lost


CHECKS = (Check("slots", slots, "leaked-slots", ("Prefect", "versions")),)
