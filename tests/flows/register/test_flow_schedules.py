"""Whether a schedule is active: a changed profile decides, else the person who switched it."""

from __future__ import annotations

from uuid import uuid4

import pytest
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule

from flows.register.flow_schedules import active_before, is_as_desired, switched
from flows.yard.profile import FlowSchedule

NIGHT, NOON = "0 3 * * *", "0 12 * * *"


def there(cron: str, active: bool) -> DeploymentSchedule:
    """A schedule as a server has it."""
    return DeploymentSchedule(
        id=uuid4(),
        deployment_id=uuid4(),
        schedule=CronSchedule(cron=cron, timezone="UTC"),
        active=active,
    )


@pytest.mark.parametrize("profile", [True, False])
@pytest.mark.parametrize("person", [True, False])
def test_the_person_decides_unless_the_profile_changed(profile: bool, person: bool) -> None:
    wanted = FlowSchedule(cron=NIGHT, active=profile)
    for before in (profile, None):
        found = switched(wanted, [there(NIGHT, person)], before)
        assert found == FlowSchedule(cron=NIGHT, active=person)
    assert switched(wanted, [there(NIGHT, person)], not profile) == wanted


def test_another_hour_does_not_wake_a_paused_schedule() -> None:
    found = switched(FlowSchedule(cron=NOON), [there(NIGHT, False)], True)
    assert found == FlowSchedule(cron=NOON, active=False)


def test_a_schedule_of_a_person_is_not_ours() -> None:
    wanted, ours = FlowSchedule(cron=NIGHT), there(NIGHT, True)
    assert switched(wanted, [there(NOON, False), ours], True) == wanted
    assert not is_as_desired(wanted, [there(NOON, False), ours])
    assert is_as_desired(wanted, [ours])


def test_none_there_or_none_wanted() -> None:
    wanted = FlowSchedule(cron=NIGHT, active=False)
    assert switched(wanted, [], None) == wanted
    assert switched(None, [there(NIGHT, False)], True) is None
    assert is_as_desired(None, [])


def test_active_of_the_last_profile() -> None:
    document = {"schedules": {"release": {"cron": NIGHT}, "pretrain-gpt": {"active": False}}}
    found = [active_before(document, flow) for flow in ("release", "pretrain-gpt", "run-stage")]
    assert found == [True, False, None]
    assert active_before({}, "release") is None
