"""Writes a yard to a Prefect server. It writes only differences, so a second registration changes
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import (
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    DeploymentFilterTags,
)
from prefect.exceptions import ObjectNotFound
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from flows.register.deployments import Flows, form_of
from flows.register.desired_state import DesiredDeployment, DesiredState
from flows.register.flow_schedules import (
    active_before,
    is_as_desired,
    switched,
    to_create,
    to_update,
)
from flows.register.report import Report, differing
from flows.runner.job_blocks import JOB_BLOCK_TYPES
from flows.yard.profile import limit_tag
from flows.yard.registered_profile import YardProfile, block_name, check_yard
from trainyard.errors import ConfigError
from trainyard.version import VERSION, build_revision

PAGE = 200


class Registration:
    """Writes one yard; a dry run only reports what it would write."""

    def __init__(
        self, client: PrefectClient, desired: DesiredState, flows: Flows, report: Report
    ) -> None:
        self.client = client
        self.desired = desired
        self.report = report
        self._flows = flows
        self.deployments: dict[str, UUID] = {}
        """Deployments of the yard, by the name of the flow."""
        self._before: Mapping[str, Any] = {}
        """The profile that was registered last."""

    async def run(self) -> None:
        """Write everything except the automations (flows/register/automations.py)."""
        name = self.desired.profile.name
        before = await self._registered()
        check_yard(name, before.get("yard", ""))
        self._before = before.get("document", {})
        await self._pool()
        await self._block_types()
        registered = YardProfile(
            document=dict(self.desired.document),
            yard=name,
            version=VERSION,
            revision=build_revision(),
        )
        await self.block(registered, block_name(name))
        for tag, most in self.desired.limits.items():
            await self._limit(tag, most)
        for deployment in self.desired.deployments:
            await self._deployment(deployment)

    # --- pool, blocks, limits ---------------------------------------------------------------------

    async def _pool(self) -> None:
        pool = self.desired.profile.pool
        what = f"work pool {pool.name} ({pool.type})"
        try:
            there = await self.client.read_work_pool(pool.name)
        except ObjectNotFound:
            template = await _job_template(pool.type)
            self.report.created(what)
            if not self.report.is_dry:
                await self.client.create_work_pool(
                    WorkPoolCreate(
                        name=pool.name,
                        type=pool.type,
                        base_job_template=template,
                        concurrency_limit=pool.concurrency_limit,
                    )
                )
            return
        if there.type != pool.type:
            raise ConfigError(
                f"work pool {pool.name} has type {there.type}, and the profile of yard "
                f"{self.desired.profile.name} says {pool.type}: give [pool] another name, or "
                f"delete the old one (prefect work-pool delete {pool.name})"
            )
        if there.concurrency_limit == pool.concurrency_limit:
            self.report.unchanged(what)
            return
        self.report.changed(what, ["concurrency_limit"])
        if not self.report.is_dry:
            update = WorkPoolUpdate(concurrency_limit=pool.concurrency_limit)
            await self.client.update_work_pool(pool.name, update)

    async def _block_types(self) -> None:
        """Write the block types that the server's pages show."""
        for block in JOB_BLOCK_TYPES:
            slug = block.get_block_type_slug()
            try:
                there = await self.client.read_block_type_by_slug(slug)
                checksum = block._calculate_schema_checksum()
                await self.client.read_block_schema_by_checksum(checksum)
            except ObjectNotFound:
                self.report.created(f"block type {slug}")
                if not self.report.is_dry:
                    await block.aregister_type_and_schema(client=self.client)
            else:
                self.report.unchanged(f"block type {there.slug}")

    async def _registered(self) -> dict[str, Any]:
        """The registered block of this yard, or of one with almost its name; empty without one."""
        slug, name = YardProfile.get_block_type_slug(), block_name(self.desired.profile.name)
        try:
            there = await self.client.read_block_document_by_name(name, slug)
        except ObjectNotFound:
            return {}
        return dict(there.data)

    async def block(self, block: Block, name: str) -> UUID | None:
        """Write a block; returns its id, or None for a new block in a dry run."""
        slug = block.get_block_type_slug()
        try:
            there = await self.client.read_block_document_by_name(name, slug, include_secrets=True)
        except ObjectNotFound:
            self.report.created(f"block {slug}/{name}")
            return None if self.report.is_dry else await self._save(block, name)
        keys = differing(there.data, _data(block))
        if not keys:
            self.report.unchanged(f"block {slug}/{name}")
            return there.id
        self.report.changed(f"block {slug}/{name}", keys)
        return there.id if self.report.is_dry else await self._save(block, name)

    async def _save(self, block: Block, name: str) -> UUID:
        return await block.asave(name, overwrite=True, client=self.client)

    async def _limit(self, tag: str, most: int) -> None:
        what = f"limit of {most} at once for {tag}"
        try:
            there = await self.client.read_concurrency_limit_by_tag(tag)
        except ObjectNotFound:
            self.report.created(what)
        else:
            if there.concurrency_limit == most:
                self.report.unchanged(what)
                return
            self.report.changed(what, [f"was {there.concurrency_limit}"])
        if not self.report.is_dry:
            await self.client.create_concurrency_limit(tag=tag, concurrency_limit=most)

    # --- deployments ------------------------------------------------------------------------------

    async def _deployment(self, desired: DesiredDeployment) -> None:
        flow = self._flows[desired.entrypoint]
        fields = _fields(desired, flow)
        what = f"deployment {flow.name}/{desired.name}"
        try:
            there = await self.client.read_deployment_by_name(f"{flow.name}/{desired.name}")
        except ObjectNotFound:
            self.report.created(what)
            if not self.report.is_dry:
                self.deployments[flow.name] = await self._create(desired, flow, fields)
            return
        self.deployments[flow.name] = there.id
        limit = there.global_concurrency_limit
        known = {
            **{key: getattr(there, key) for key in fields},
            "concurrency_limit": None if limit is None else limit.limit,
        }
        keys = differing(known, fields)
        before = active_before(self._before, flow.name)
        schedule = switched(desired.schedule, there.schedules, before)
        if schedule is not None and schedule != desired.schedule:
            self.report.kept(f"{what}: schedule {'active' if schedule.active else 'paused'}")
        if not is_as_desired(schedule, there.schedules):
            keys.append("schedule")
        if not keys:
            self.report.unchanged(what)
            return
        self.report.changed(what, keys)
        if not self.report.is_dry:
            update = DeploymentUpdate(**fields, schedules=to_update(schedule))
            await self.client.update_deployment(there.id, update)

    async def _create(
        self, desired: DesiredDeployment, flow: Flow[..., Any], fields: dict[str, Any]
    ) -> UUID:
        return await self.client.create_deployment(
            flow_id=await self.client.create_flow_from_name(flow.name),
            name=desired.name,
            schedules=to_create(desired.schedule),
            **fields,
        )


def _fields(desired: DesiredDeployment, flow: Flow[..., Any]) -> dict[str, Any]:
    """The fields of a deployment, by Prefect's names."""
    return {
        "version": desired.version,
        "description": desired.description,
        "parameters": dict(desired.parameters),
        "parameter_openapi_schema": form_of(flow),
        "enforce_parameter_schema": True,
        "tags": sorted(desired.tags),
        "entrypoint": desired.entrypoint,
        "pull_steps": desired.pull_steps,
        "work_pool_name": desired.pool,
        "job_variables": {"env": dict(desired.environment)},
        "concurrency_limit": desired.concurrency_limit,
    }


def _data(block: Block) -> dict[str, Any]:
    """The fields of a block that the server stores, with secrets in clear."""
    return block.model_dump(
        mode="json",
        exclude={"block_type_slug"},
        context={"include_secrets": True},
    )


async def _job_template(pool_type: str) -> dict[str, Any]:
    template = await get_default_base_job_template_for_infrastructure_type(pool_type)
    if template is None:
        raise ConfigError(
            f"[pool] type {pool_type!r}: no worker of that type is installed; use 'process', or "
            f"install the Prefect integration that has it"
        )
    return template


# --- leftovers: on the server, and no longer in the profile ---------------------------------------


async def report_leftovers(client: PrefectClient, desired: DesiredState, report: Report) -> None:
    """Report deployments, limits and automations of the yard that this registration did not write.

    It removes none: a deployment has its runs and their logs."""
    for name in await _deployments(client, desired):
        report.left_over(f"deployment {name}", f"prefect deployment delete {name}")
    for tag in await _limits(client, desired):
        report.left_over(f"limit for {tag}", f"prefect concurrency-limit delete {tag}")
    for name in await _automations(client, desired):
        report.left_over(f"automation {name}", f"prefect automation delete {name!r}")


async def _deployments(client: PrefectClient, desired: DesiredState) -> list[str]:
    ours = DeploymentFilter(
        name=DeploymentFilterName(any_=[desired.profile.name]),
        tags=DeploymentFilterTags(all_=list(desired.tags)),
    )
    found, names = await client.read_deployments(deployment_filter=ours, limit=PAGE), []
    entrypoints = {one.entrypoint for one in desired.deployments}
    for deployment in found:
        if deployment.entrypoint not in entrypoints:
            flow = await client.read_flow(deployment.flow_id)
            names.append(f"{flow.name}/{deployment.name}")
    return sorted(names)


async def _limits(client: PrefectClient, desired: DesiredState) -> list[str]:
    found = await client.read_concurrency_limits(limit=PAGE, offset=0)
    beginning = limit_tag(desired.profile.name, "")
    tags = {one.tag for one in found if one.tag.startswith(beginning)}
    return sorted(tags - desired.limits.keys())


async def _automations(client: PrefectClient, desired: DesiredState) -> list[str]:
    found = await client.read_automations(limit=PAGE)
    names = {one.name for one in found if one.name.startswith(desired.automation_name(""))}
    return sorted(names - set(desired.automation_names()))
