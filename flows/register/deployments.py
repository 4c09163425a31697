"""The flows of a yard's deployments, and whether each can run with what it would be given.

All of it is looked at before anything is written: a schedule that Prefect refuses, or that never
comes, and a parameter that a flow has not, are found by whoever registers and not at night."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prefect import Flow
from prefect.flows import load_flow_from_entrypoint
from prefect.server.schemas.schedules import CronSchedule
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic import ValidationError as NotValid

from flows.register.desired_state import ROOT, DesiredDeployment, DesiredState
from flows.yard.profile import Schedule
from trainyard.config import check_known
from trainyard.errors import ConfigError

Flows = Mapping[str, Flow[..., Any]]
"""By the entrypoint of the deployment."""


def load_flows(desired: DesiredState) -> Flows:
    """The flows of all deployments; ConfigError for a schedule or a parameter that cannot be."""
    flows: dict[str, Flow[..., Any]] = {}
    for one in desired.deployments:
        flow: Flow[..., Any] = load_flow_from_entrypoint(str(ROOT / one.entrypoint))
        flows[one.entrypoint] = flow
        form = parameter_schema(flow).model_dump_for_openapi()
        check_parameters(one.parameters, form, f"prefect.yaml: deployment {one.entrypoint}")
        if one.schedule is not None:
            where = f"yard {one.name} [schedules.{flow.name}]"
            check_schedule(one.schedule, where)
            own = f"{where[:-1]}.parameters]"
            check_parameters(_together(one), form, own)
    return flows


def _together(one: DesiredDeployment) -> dict[str, Any]:
    assert one.schedule is not None
    return {**one.parameters, **one.schedule.parameters}


def check_schedule(schedule: Schedule, where: str) -> None:
    """ConfigError for one that Prefect does not take, and for one that never comes: its scheduler
    would stumble over that every minute."""
    try:
        known = CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
        asyncio.run(known.get_dates(1))
    except NotValid as error:
        is_cron = error.errors()[0]["loc"] == ("cron",)
        raise ConfigError(
            f"{where}: {_wrong_cron(schedule) if is_cron else _zone(schedule)}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{where}: cron {schedule.cron!r} never comes: there is no such day ({error})"
        ) from error


def _wrong_cron(schedule: Schedule) -> str:
    return (
        f"cron {schedule.cron!r} is none that Prefect knows; write minute, hour, day, month and "
        f'weekday, such as "0 3 * * *" for three o\'clock each night'
    )


def _zone(schedule: Schedule) -> str:
    return (
        f"timezone {schedule.timezone!r} is none that Prefect knows; write a name of the IANA "
        f'list, such as "Europe/Berlin" or "UTC"'
    )


def check_parameters(given: Mapping[str, Any], form: dict[str, Any], where: str) -> None:
    """ConfigError for a parameter that the flow has not, or that is of another type."""
    check_known(given, form["properties"], where)
    try:
        validate(dict(given), form, raise_on_error=True, ignore_required=True)
    except ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
