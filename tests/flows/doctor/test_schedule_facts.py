"""A schedule of a server beside that of the profile, and its due times beside its runs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

from flows.doctor.schedule_facts import difference, recently_due, without_run
from flows.yard.profile import FlowSchedule

NIGHT, NOON = "0 3 * * *", "0 12 * * *"


def there(schedule: Any = None, **known: Any) -> DeploymentSchedule:
    """A schedule as a server has it."""
    given = {"schedule": schedule or CronSchedule(cron=NIGHT, timezone="UTC"), "active": True}
    return DeploymentSchedule(id=uuid4(), deployment_id=uuid4(), **{**given, **known})


WANTED = FlowSchedule(cron=NIGHT, parameters={"recipe": "mine.toml"})
PARAMETERS = {"recipe": "mine.toml", "profile": "local"}


def test_a_schedule_that_agrees_with_the_profile_has_no_difference() -> None:
    assert difference(WANTED, [there()], PARAMETERS) == ""
    assert difference(WANTED, [there(active=False)], PARAMETERS) == ""  # a person paused it
    assert difference(None, [there(active=False)], {}) == ""
    assert difference(None, [], {}) == ""


@pytest.mark.parametrize(
    ("found", "parameters", "words"),
    [
        ([], PARAMETERS, "its schedule is none, and the profile says 0 3 * * * (UTC)"),
        ([there(CronSchedule(cron=NOON, timezone="UTC"))], PARAMETERS, "is 0 12 * * * (UTC), and"),
        ([there(IntervalSchedule(interval=timedelta(hours=1)))], PARAMETERS, "IntervalSchedule"),
        ([there()], {"recipe": "recipes/incoming.toml"}, "lack recipe = 'mine.toml'"),
        ([there()], {}, "lack recipe = 'mine.toml' of the profile"),
        ([there(parameters={"recipe": "x"})], PARAMETERS, "(recipe), which a pause loses"),
    ],
)
def test_a_difference_is_named(
    found: list[DeploymentSchedule], parameters: dict[str, Any], words: str
) -> None:
    assert words in difference(WANTED, found, parameters)


def test_a_schedule_that_the_profile_does_not_have_is_named() -> None:
    assert difference(None, [there()], {}) == "the profile has no schedule for it"


NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def due(cron: str, since: datetime, timezone: str = "UTC") -> list[datetime]:
    schedule = CronSchedule(cron=cron, timezone=timezone)
    return asyncio.run(recently_due(schedule, since, NOW))


@pytest.mark.parametrize(
    ("cron", "last"),
    [
        ("* * * * * */5", NOW),
        ("* * * * *", NOW),
        ("0 3 * * *", datetime(2026, 11, 23, 3, tzinfo=UTC)),
        ("30 4 * * 0", datetime(2026, 11, 22, 4, 30, tzinfo=UTC)),
        ("0 0 1 * *", datetime(2026, 11, 1, tzinfo=UTC)),
    ],
)
def test_the_last_times_are_found_for_seconds_and_for_months(cron: str, last: datetime) -> None:
    found = due(cron, NOW - timedelta(days=365))
    assert (found[-1], len(found)) == (last, 3)
    assert found == sorted(found)


def test_a_schedule_was_not_due_before_it_was_written() -> None:
    assert due(NIGHT, NOW - timedelta(hours=1)) == []
    assert due(NIGHT, NOW - timedelta(hours=25)) == [NOW - timedelta(hours=9)]


def test_a_time_zone_counts() -> None:
    (found,) = due(NIGHT, NOW - timedelta(days=1), "Europe/Berlin")
    assert found == NOW - timedelta(hours=10)


def test_due_times_without_a_run() -> None:
    times = [NOW - timedelta(days=days) for days in (3, 2, 1)]
    assert without_run(times, []) == times
    assert without_run(times, [times[0] + timedelta(milliseconds=3), times[2]]) == [times[1]]
