"""Checks the schedules of a yard: each has a next run, ran when it was due, and is as in the
profile; and no run waits for a missing worker.

The server's scheduler plans the next runs of every schedule. If it fails or is switched off, only
the server's log says so, and scheduled runs do not happen."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from flows.doctor.check import Check, CheckResult, State, fail, ok, skipped, warn
from flows.doctor.context import YardContext
from flows.doctor.schedule_facts import TOLERANCE, difference, recently_due, without_run
from flows.yard.profile import FlowSchedule, Profile
from trainyard.errors import InfrastructureError

PAGE = 200

LATE = timedelta(seconds=90)
"""A run this late is an error: a worker polls every 10 to 15 seconds and takes runs before they are
due."""
NEW = timedelta(seconds=120)
"""A schedule younger than this may have no run yet: the scheduler plans once a minute."""
POLLED = timedelta(seconds=60)
"""A queue that no worker polled for this long has no worker."""

WAITING = ["Scheduled", "Late"]
"""Names of states of runs that no worker has picked up. A run that waits for a slot or a retry has
a state of the same type with another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Where the runs of a deployment wait for a worker."""

    pool: str
    name: str
    is_paused: bool = False
    """Whether the queue or its pool is paused."""
    polled: datetime | None = None
    """When a worker last polled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """When a deployment runs, as the server has it."""

    name: str
    """FLOW/YARD."""
    is_scheduled: bool
    """Whether it has an active schedule and is not paused."""
    changed: datetime
    """When a schedule of it was last changed."""
    queue: Queue | None
    """None if its work pool was deleted."""
    planned: datetime | None = None
    """The next scheduled run."""
    due: tuple[datetime, ...] = ()
    """When late runs were due, the oldest first; `PAGE` at most."""
    missed: tuple[datetime, ...] = ()
    """The recent due times without a run, the oldest first; empty if the newest has one."""
    is_never_run: bool = False
    """Whether none of the recent due times has a run."""
    differs: str = ""
    """How it differs from the profile."""


def schedules(yard: YardContext) -> CheckResult:
    """Scheduled runs are planned, and start."""
    try:
        found = asyncio.run(_timetables(yard.profile))
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise InfrastructureError(f"schedules cannot be read from the server: {error}") from error
    return judge(found, yard.profile.name, datetime.now(UTC))


# --- judging --------------------------------------------------------------------------------------


def judge(found: Sequence[Timetable], yard: str, now: datetime) -> CheckResult:
    """The answer for all deployments of a yard."""
    ill = [answer for one in found for answer in _of_one(one, yard, now)]
    if ill:
        todo = "; ".join(dict.fromkeys(answer.todo for answer in ill))
        message = "; ".join(answer.message for answer in ill)
        failed = any(answer.state is State.FAIL for answer in ill)
        return fail(InfrastructureError, message, todo) if failed else warn(message, todo)
    scheduled = [one for one in found if one.is_scheduled]
    if not scheduled:
        return skipped(f"no deployment of yard {yard} has an active schedule, and no run is late")
    return ok(
        ", ".join(f"{one.name} next at {_at(one.planned)}" for one in scheduled if one.planned)
    )


def _of_one(one: Timetable, yard: str, now: datetime) -> list[CheckResult]:
    ill = []
    if one.is_scheduled and one.planned is None:
        ill.append(_unplanned(one, now))
    if one.missed:
        ill.append(_missed(one))
    if one.due:
        ill.append(_late(one, yard, now))
    if one.differs:
        ill.append(
            warn(
                f"{one.name}: {one.differs}",
                f"python -m flows.register --profile {yard} corrects it",
            )
        )
    return ill


def _unplanned(one: Timetable, now: datetime) -> CheckResult:
    if now - one.changed <= NEW:
        return warn(
            f"{one.name} has an active schedule and no planned run yet; it was changed "
            f"{_for(now - one.changed)} ago",
            "run doctor again in two minutes",
        )
    return fail(
        InfrastructureError,
        f"{one.name} has an active schedule and no planned run: the server's scheduler does not "
        f"work",
        "look for schedule_deployments in the server's log; it must not be switched off "
        "(PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED), and Prefect there needs the versions of "
        "constraints.txt (SQLAlchemy below 2.1)",
    )


def _missed(one: Timetable) -> CheckResult:
    judged = partial(fail, InfrastructureError) if one.is_never_run else warn
    return judged(
        f"{one.name} was due at {_at(one.missed[-1])} and has no run of that time: the server or "
        f"its scheduler was down",
        f"keep the server running; for a run now: prefect deployment run {one.name}",
    )


def _late(one: Timetable, yard: str, now: datetime) -> CheckResult:
    count = f"{len(one.due)}{' or more' if len(one.due) >= PAGE else ''}"
    message = (
        f"late runs of {one.name}: {count}, the oldest by {_for(now - one.due[0])} "
        f"(due {_at(one.due[0])}): "
    )
    queue = one.queue
    if queue is None:
        return fail(
            InfrastructureError,
            f"{message}its work pool was deleted",
            f"python -m flows.register --profile {yard} creates it",
        )
    where = f"queue {queue.name} of work pool {queue.pool}"
    if queue.is_paused:
        resume = f"prefect work-queue resume {queue.name} --pool {queue.pool}"
        return warn(
            f"{message}{where} is paused", f"prefect work-pool resume {queue.pool}, or {resume}"
        )
    if queue.polled is None or now - queue.polled > POLLED:
        asked = "never" if queue.polled is None else f"{_for(now - queue.polled)} ago"
        return fail(
            InfrastructureError,
            f"{message}no worker polls {where} (last polled: {asked})",
            f"python -m flows.worker --pool {queue.pool}, as a service that restarts",
        )
    return warn(
        f"{message}a worker polls {where} and does not take them: the worker, the pool or the "
        f"deployment is at its limit of runs",
        "wait, or allow more: concurrency_limit in [pool] of the profile, --limit of the worker. "
        "To cancel runs that are no longer needed: prefect flow-run ls --state Late, prefect "
        "flow-run cancel ID",
    )


def _at(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _for(span: timedelta) -> str:
    minutes, seconds = divmod(int(span.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds} s"


# --- reading the server ---------------------------------------------------------------------------


async def _timetables(profile: Profile) -> list[Timetable]:
    ours = DeploymentFilter(name=DeploymentFilterName(any_=[profile.name]))
    async with get_client() as client:
        found = await client.read_deployments(deployment_filter=ours, limit=PAGE)
        return [await _timetable(client, one, profile.schedules) for one in found]


async def _timetable(
    client: PrefectClient, one: DeploymentResponse, schedules: Mapping[str, FlowSchedule]
) -> Timetable:
    now = datetime.now(UTC)
    flow = await client.read_flow(one.flow_id)
    late = await _waiting(client, one, before_=now - LATE)
    ahead = await _waiting(client, one, after_=now)
    changed = [schedule.updated for schedule in one.schedules if schedule.updated is not None]
    recent = [] if one.paused else await _recently_due(one.schedules, now - LATE)
    runs = await _expected(client, one, recent[0] - TOLERANCE, now) if recent else []
    missed = without_run(recent, runs)
    return Timetable(
        name=f"{flow.name}/{one.name}",
        is_scheduled=not one.paused and any(schedule.active for schedule in one.schedules),
        changed=max(changed, default=now),
        queue=await _queue(client, one),
        planned=next((_due(run) for run in ahead if run.auto_scheduled), None),
        due=tuple(_due(run) for run in late),
        missed=tuple(missed) if missed[-1:] == recent[-1:] else (),
        is_never_run=missed == recent,
        differs=difference(schedules.get(flow.name), one.schedules, one.parameters),
    )


async def _recently_due(schedules: Sequence[DeploymentSchedule], until: datetime) -> list[datetime]:
    """The last times at which an active schedule was due, in order."""
    found: list[datetime] = []
    for one in schedules:
        if one.active and one.updated is not None and isinstance(one.schedule, CronSchedule):
            found += await recently_due(one.schedule, one.updated, until)
    return sorted(found)


async def _expected(
    client: PrefectClient, one: DeploymentResponse, after: datetime, before: datetime
) -> list[datetime]:
    """When the runs of a deployment were due that its schedules planned, in any state."""
    when = FlowRunFilterExpectedStartTime.model_validate({"after_": after, "before_": before})
    found = await client.read_flow_runs(
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [one.id]}}),
        flow_run_filter=FlowRunFilter(expected_start_time=when),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
    )
    return [
        run.expected_start_time for run in found if run.auto_scheduled and run.expected_start_time
    ]


async def _waiting(
    client: PrefectClient, one: DeploymentResponse, **bound: datetime
) -> list[FlowRun]:
    """The runs that no worker has picked up, due `before_` or `after_`, in order."""
    when = FlowRunFilterNextScheduledStartTime.model_validate(bound)
    names = FlowRunFilterState(name=FlowRunFilterStateName(any_=WAITING))
    return await client.read_flow_runs(
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [one.id]}}),
        flow_run_filter=FlowRunFilter(state=names, next_scheduled_start_time=when),
        sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
        limit=PAGE,
    )


def _due(run: FlowRun) -> datetime:
    assert run.next_scheduled_start_time is not None  # which the filter asks for
    return run.next_scheduled_start_time


async def _queue(client: PrefectClient, one: DeploymentResponse) -> Queue | None:
    if one.work_pool_name is None or one.work_queue_name is None:
        return None
    try:
        pool = await client.read_work_pool(one.work_pool_name)
        queue = await client.read_work_queue_by_name(one.work_queue_name, pool.name)
    except ObjectNotFound:
        return None
    return Queue(
        pool=pool.name,
        name=queue.name,
        is_paused=pool.is_paused or queue.is_paused,
        polled=queue.last_polled,
    )


CHECKS = (Check("schedules", schedules, "late-or-missing-runs", ("Prefect", "versions")),)
