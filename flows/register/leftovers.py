"""What a server still has of a yard and nobody wants any more: named, and left to a person.

A deployment has its runs and their logs behind it, so none is removed here."""

from __future__ import annotations

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    DeploymentFilterTags,
)

from flows.register.report import Report
from flows.register.wanted import Wanted
from flows.yard.place import limit_tag

PAGE = 200


async def report_leftovers(client: PrefectClient, wanted: Wanted, report: Report) -> None:
    """Name deployments, limits and automations of the yard that this registration does not want."""
    for name in await _deployments(client, wanted):
        report.left_over(f"deployment {name}", f"prefect deployment delete {name}")
    for tag in await _limits(client, wanted):
        report.left_over(f"limit for {tag}", f"prefect concurrency-limit delete {tag}")
    for name in await _automations(client, wanted):
        report.left_over(f"automation {name}", f"prefect automation delete {name!r}")


async def _deployments(client: PrefectClient, wanted: Wanted) -> list[str]:
    ours = DeploymentFilter(
        name=DeploymentFilterName(any_=[wanted.profile.name]),
        tags=DeploymentFilterTags(all_=list(wanted.tags)),
    )
    found, names = await client.read_deployments(deployment_filter=ours, limit=PAGE), []
    entrypoints = {one.entrypoint for one in wanted.deployments}
    for deployment in found:
        if deployment.entrypoint not in entrypoints:
            flow = await client.read_flow(deployment.flow_id)
            names.append(f"{flow.name}/{deployment.name}")
    return sorted(names)


async def _limits(client: PrefectClient, wanted: Wanted) -> list[str]:
    found = await client.read_concurrency_limits(limit=PAGE, offset=0)
    beginning = limit_tag(wanted.profile.name, "")
    tags = {one.tag for one in found if one.tag.startswith(beginning)}
    return sorted(tags - wanted.limits.keys())


async def _automations(client: PrefectClient, wanted: Wanted) -> list[str]:
    found = await client.read_automations(limit=PAGE)
    names = {one.name for one in found if one.name.startswith(wanted.automation_name(""))}
    return sorted(names - set(wanted.automation_names()))
