"""The schedule of a deployment: what a profile says, and what a person has switched since.

Pausing and resuming in Prefect's pages is how a person stops the nights of a yard, and what was
stopped there stays so. The profile wins when it is the profile that has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentScheduleUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule

from flows.yard.profile import Schedule


def switched(
    desired: Schedule | None, there: Sequence[DeploymentSchedule], before: bool | None
) -> Schedule | None:
    """The schedule to be written, active or not as a person left it.

    there: on the server. before: `active` in the profile that was registered last; None when none
    was, or it had no schedule for this flow."""
    if desired is None or not there or before not in (None, desired.active):
        return desired
    ours = next((one for one in there if one.schedule == _cron(desired)), there[0])
    return replace(desired, active=ours.active)


def active_before(document: Mapping[str, Any], flow: str) -> bool | None:
    """`active` of a flow's schedule in a profile's tables; None when there is no such schedule."""
    table = document.get("schedules", {}).get(flow)
    return None if table is None else bool(table.get("active", True))


def to_create(desired: Schedule | None) -> list[DeploymentScheduleCreate]:
    """Of a new deployment."""
    if desired is None:
        return []
    parameters = dict(desired.parameters)
    return [
        DeploymentScheduleCreate(
            schedule=_cron(desired), active=desired.active, parameters=parameters
        )
    ]


def to_update(desired: Schedule | None) -> list[DeploymentScheduleUpdate]:
    """Of a deployment that is there: instead of all that it has."""
    return [
        DeploymentScheduleUpdate(
            schedule=one.schedule, active=one.active, parameters=one.parameters
        )
        for one in to_create(desired)
    ]


def is_as_desired(desired: Schedule | None, there: Sequence[DeploymentSchedule]) -> bool:
    """True when the server has this schedule and no other."""
    found = [(one.schedule, one.active, one.parameters) for one in there]
    return found == [(one.schedule, one.active, one.parameters) for one in to_create(desired)]


def _cron(desired: Schedule) -> CronSchedule:
    return CronSchedule(cron=desired.cron, timezone=desired.timezone)
