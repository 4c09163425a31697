"""Loads the flows of a yard's deployments, and checks their schedules and parameters.

The checks run before anything is written. They refuse a schedule that Prefect does not accept or
that never fires, and a parameter that a flow does not have."""

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

from flows.recipes.form_schema import form_schema, recipes_in
from flows.recipes.overrides import STAGES_OF, read_overrides
from flows.register.desired_state import ROOT, DesiredState
from flows.yard.profile import FlowSchedule
from trainyard.config import check_known
from trainyard.errors import ConfigError

Flows = Mapping[str, Flow[..., Any]]
"""Flows, by the entrypoint of their deployment."""


def load_flows(desired: DesiredState) -> Flows:
    """The flows of all deployments; ConfigError for an impossible schedule or parameter."""
    flows: dict[str, Flow[..., Any]] = {}
    for one in desired.deployments:
        flow: Flow[..., Any] = load_flow_from_entrypoint(str(ROOT / one.entrypoint))
        flows[one.entrypoint] = flow
        form = form_of(flow)
        if one.schedule is not None:
            where = f"yard {one.name} [schedules.{flow.name}]"
            check_flow_schedule(one.schedule, where)
            own = f"{where[:-1]}.parameters]"
            check_no_dry_run(one.schedule.parameters, form, own)
            check_overrides(one.schedule.parameters, flow.name, own)
            check_parameters(one.schedule.parameters, form, own)
        check_parameters(one.parameters, form, f"prefect.yaml: deployment {one.entrypoint}")
    return flows


def form_of(flow: Flow[..., Any]) -> dict[str, Any]:
    """The schema of a flow's form, with the recipes of these sources."""
    schema = parameter_schema(flow).model_dump_for_openapi()
    return form_schema(schema, recipes_in(ROOT), flow.name if flow.name in STAGES_OF else "")


def check_flow_schedule(schedule: FlowSchedule, where: str) -> None:
    """ConfigError for a schedule that Prefect does not accept or that never fires: the server's
    scheduler would fail on it every minute."""
    try:
        known = CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
        asyncio.run(known.get_dates(1))
    except NotValid as error:
        if error.errors()[0]["loc"] == ("cron",):
            raise ConfigError(
                f"{where}: cron {schedule.cron!r} is not valid in Prefect; write minute, hour, "
                f'day, month and weekday, such as "0 3 * * *" for three o\'clock each night'
            ) from error
        raise ConfigError(
            f"{where}: timezone {schedule.timezone!r} is not valid in Prefect; write a name of the "
            f'IANA list, such as "Europe/Berlin" or "UTC"'
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{where}: cron {schedule.cron!r} never fires, as no such day exists ({error})"
        ) from error


def check_overrides(given: Mapping[str, Any], flow: str, where: str) -> None:
    """ConfigError for `overrides` with which each run would fail, with the nearest name."""
    text = given.get("overrides")
    if flow in STAGES_OF and isinstance(text, str):
        try:
            read_overrides(flow, text)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def check_no_dry_run(given: Mapping[str, Any], form: dict[str, Any], where: str) -> None:
    """ConfigError for parameter dry_run, which `remove` replaced."""
    if "dry_run" in given and "remove" in form["properties"]:
        raise ConfigError(
            f"{where}: dry_run ({given['dry_run']}) has become `remove`, which is off by default: "
            f"leave dry_run out for a report, or write remove = true to let it remove"
        )


def check_parameters(given: Mapping[str, Any], form: dict[str, Any], where: str) -> None:
    """ConfigError for a parameter that the flow does not have, or of another type."""
    check_known(given, form["properties"], where)
    try:
        validate(dict(given), form, raise_on_error=True, ignore_required=True)
    except ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
