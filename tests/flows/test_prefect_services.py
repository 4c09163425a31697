"""The services of Prefect's server work with the installed packages.

A service that fails only logs it: with SQLAlchemy 2.1 no schedule ever ran."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path

import pytest
from docket import Docket, Worker
from prefect.server import models, schemas
from prefect.server.api.background_workers import task_functions
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import temporary_database_config
from prefect.server.services.perpetual_services import (
    get_enabled_perpetual_services,
    register_and_schedule_perpetual_services,
)
from prefect.settings import PREFECT_SERVER_ANALYTICS_ENABLED, temporary_settings
from sqlalchemy.schema import CreateIndex, CreateTable

pytestmark = pytest.mark.slow  # and not collected by unit tests: imports of seconds

SERVICES = {
    "ensure_cancelling_timeout_checks",
    "evaluate_proactive_triggers_periodic",
    "monitor_cancelled_flow_runs",
    "monitor_expired_leases",
    "monitor_late_runs",
    "monitor_worker_health",
    "schedule_deployments",
    "schedule_recent_deployments",
}
"""Those that a yard counts on."""


def test_services_run_and_plan_schedules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what tasks of earlier tests left is logged now, and not counted
    caplog.clear()
    database = AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
    with (
        temporary_settings({PREFECT_SERVER_ANALYTICS_ENABLED: False}),
        temporary_database_config(database),
        caplog.at_level(logging.ERROR, "docket"),
    ):
        enabled, planned = asyncio.run(_once())
    assert enabled >= SERVICES
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert planned > 2


async def _once() -> tuple[set[str], int]:
    """The services that are enabled, and the runs that they planned for a deployment."""
    db = provide_database_interface()
    # As Prefect's migrations do, in a twentieth of the time. An index may stand twice there.
    async with (await db.engine()).begin() as connection:
        for table in db.Base.metadata.sorted_tables:
            await connection.execute(CreateTable(table))
            for index in table.indexes:
                await connection.execute(CreateIndex(index, if_not_exists=True))
    schedule = schemas.schedules.IntervalSchedule(interval=5)
    async with db.session_context(begin_transaction=True) as session:
        flow = await models.flows.create_flow(session, schemas.core.Flow(name="flow"))
        scheduled = schemas.core.DeploymentSchedule(schedule=schedule, active=True)
        offered = schemas.core.Deployment(name="yard", flow_id=flow.id, schedules=[scheduled])
        await models.deployments.create_deployment(session, offered)
    names = {one.function.__name__ for one in get_enabled_perpetual_services()}
    async with (
        Docket(name="services", url="memory://") as docket,
        Worker(docket, concurrency=1) as worker,  # SQLite has one writer at a time
    ):
        for task in task_functions:
            docket.register(task)
        await register_and_schedule_perpetual_services(docket)
        await worker.run_at_most(dict.fromkeys(names, 1))
    async with db.session_context() as session:
        planned = await models.flow_runs.count_flow_runs(session)
    await (await db.engine()).dispose()
    return names, planned
