"""Decides the schedule of a deployment: from the profile, paused or active as a person left it.

Its parameters are the deployment's: Prefect empties those of a schedule when somebody pauses it.

People pause and resume schedules in Prefect's pages, and registration keeps their choice. If
`active` changed in the profile, the profile wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentScheduleUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule

from flows.yard.profile import FlowSchedule


def switched(
    desired: FlowSchedule | None, there: Sequence[DeploymentSchedule], before: bool | None
) -> FlowSchedule | None:
    """The schedule to write, active or not as a person left it.

    there: on the server. before: `active` in the profile that was registered last; None if none
    was, or if it had no schedule for this flow."""
    if desired is None or not there or before not in (None, desired.active):
        return desired
    ours = next((one for one in there if one.schedule == _cron(desired)), there[0])
    return replace(desired, active=ours.active)


def active_before(document: Mapping[str, Any], flow: str) -> bool | None:
    """`active` of a flow's schedule in a profile's tables; None without such a schedule."""
    table = document.get("schedules", {}).get(flow)
    return None if table is None else bool(table.get("active", True))


def to_create(desired: FlowSchedule | None) -> list[DeploymentScheduleCreate]:
    """The schedules of a new deployment, at most one."""
    if desired is None:
        return []
    return [DeploymentScheduleCreate(schedule=_cron(desired), active=desired.active)]


def to_update(desired: FlowSchedule | None) -> list[DeploymentScheduleUpdate]:
    """The schedules that replace all those of an existing deployment."""
    return [
        DeploymentScheduleUpdate(
            schedule=one.schedule, active=one.active, parameters=one.parameters
        )
        for one in to_create(desired)
    ]


def is_as_desired(desired: FlowSchedule | None, there: Sequence[DeploymentSchedule]) -> bool:
    """Whether the server has this schedule and no other."""
    found = [(one.schedule, one.active, one.parameters) for one in there]
    return found == [(one.schedule, one.active, one.parameters) for one in to_create(desired)]


def _cron(desired: FlowSchedule) -> CronSchedule:
    return CronSchedule(cron=desired.cron, timezone=desired.timezone)
