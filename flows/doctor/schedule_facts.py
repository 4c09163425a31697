"""What a schedule on the server should have: the values of the profile, and a run at each due time.

Pure functions of the server's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.server.schemas.schedules import CronSchedule as Calendar

from flows.yard.profile import FlowSchedule

RECENT = 3
"""Due times that are looked back at."""
WINDOWS = (timedelta(minutes=10), timedelta(hours=8), timedelta(days=9), timedelta(days=100))
"""Spans to look back over, the shortest first: Prefect lists a thousand times of a schedule."""
TOLERANCE = timedelta(seconds=1)


def difference(
    desired: FlowSchedule | None,
    there: Sequence[DeploymentSchedule],
    parameters: Mapping[str, Any],
) -> str:
    """How the schedules and parameters of a deployment differ from the profile; empty if they do
    not. Whether one is active is for a person to decide, so it is not compared."""
    if desired is None:
        return "the profile has no schedule for it" if any(one.active for one in there) else ""
    ours = CronSchedule(cron=desired.cron, timezone=desired.timezone)
    if [one.schedule for one in there] != [ours]:
        shown = ", ".join(_shown(one) for one in there) or "none"
        return f"its schedule is {shown}, and the profile says {desired.cron} ({desired.timezone})"
    lost = [key for key, value in desired.parameters.items() if parameters.get(key) != value]
    if lost:
        return f"its parameters lack {lost[0]} = {desired.parameters[lost[0]]!r} of the profile"
    own = [key for one in there for key in one.parameters]
    if own:
        return f"its schedule has parameters of its own ({', '.join(own)}), which a pause loses"
    return ""


def _shown(one: DeploymentSchedule) -> str:
    if isinstance(one.schedule, CronSchedule):
        return f"{one.schedule.cron} ({one.schedule.timezone})"
    return type(one.schedule).__name__


async def recently_due(schedule: CronSchedule, since: datetime, until: datetime) -> list[datetime]:
    """The last times at which a schedule was due, `RECENT` at most; since: when it was changed."""
    calendar = Calendar(cron=schedule.cron, timezone=schedule.timezone)
    found: list[datetime] = []
    for span in WINDOWS:
        start = max(since, until - span)
        found = [*await calendar.get_dates(start=start, end=until)]
        if len(found) >= RECENT or start == since:
            break
    return found[-RECENT:]


def without_run(due: Sequence[datetime], planned: Sequence[datetime]) -> list[datetime]:
    """The due times for which the server has no run; planned: those of its runs."""
    return [moment for moment in due if not any(abs(one - moment) <= TOLERANCE for one in planned)]
