"""Schedules as a server has them, and what doctor makes of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flows.doctor.check import State
from flows.doctor.flow_schedules import LATE, NEW, PAGE, POLLED, Queue, Timetable, judge
from trainyard.errors import InfrastructureError

NOW = datetime(2026, 11, 23, 3, 0, tzinfo=UTC)
LONG_AGO = NOW - timedelta(days=3)
NAME = "corpus-refresh/night"


def queue(**known: Any) -> Queue:
    return Queue(
        **{"pool": "site", "name": "default", "polled": NOW - timedelta(seconds=9)} | known
    )


def timetable(**known: Any) -> Timetable:
    given = {"name": NAME, "is_scheduled": True, "changed": LONG_AGO, "queue": queue()}
    return Timetable(**{**given, "planned": NOW + timedelta(hours=1), **known})


def test_a_schedule_with_a_next_run_passes_and_reports_its_time() -> None:
    answer = judge([timetable()], "night", NOW)
    assert (answer.state, answer.message) == (State.OK, f"{NAME} next at 2026-11-23 04:00 UTC")


def test_a_schedule_without_a_next_run_is_a_fault_of_the_server() -> None:
    answer = judge([timetable(planned=None)], "night", NOW)
    assert (answer.state, answer.exit_status) == (State.FAIL, InfrastructureError.exit_status)
    assert f"{NAME} has an active schedule and no planned run" in answer.message
    assert "schedule_deployments" in answer.todo
    assert "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED" in answer.todo


def test_a_schedule_that_was_just_written_is_given_time() -> None:
    answer = judge([timetable(planned=None, changed=NOW - NEW / 2)], "night", NOW)
    message = f"{NAME} has an active schedule and no planned run yet; it was changed 1 min ago"
    assert (answer.state, answer.message) == (State.WARN, message)
    assert "two minutes" in answer.todo


@pytest.mark.parametrize("found", [[], [timetable(is_scheduled=False, planned=None)]])
def test_the_check_skips_a_yard_without_an_active_schedule(found: list[Timetable]) -> None:
    assert judge(found, "night", NOW).state is State.SKIPPED


DUE = (NOW - timedelta(hours=26, minutes=4), NOW - LATE)


@pytest.mark.parametrize(
    ("where", "state", "message", "todo"),
    [
        (
            queue(polled=NOW - timedelta(minutes=7)),
            State.FAIL,
            "no worker polls queue default of work pool site (last polled: 7 min ago)",
            "python -m flows.worker --pool site",
        ),
        (
            queue(polled=None),
            State.FAIL,
            "(last polled: never)",
            "python -m flows.worker --pool site",
        ),
        (
            queue(polled=NOW - POLLED * 2, is_paused=True),
            State.WARN,
            "queue default of work pool site is paused",
            "prefect work-pool resume site, or prefect work-queue resume default --pool site",
        ),
        (queue(), State.WARN, "a worker polls queue default", "concurrency_limit in [pool]"),
        (None, State.FAIL, "its work pool was deleted", "python -m flows.register --profile night"),
    ],
    ids=["worker gone", "never a worker", "paused", "full", "no pool"],
)
def test_late_runs_name_the_cause(
    where: Queue | None, state: State, message: str, todo: str
) -> None:
    answer = judge([timetable(due=DUE, queue=where)], "night", NOW)
    late = f"late runs of {NAME}: 2, the oldest by 26 h 4 min (due 2026-11-22 00:56 UTC)"
    assert answer.state is state
    assert answer.message.startswith(late)
    assert message in answer.message
    assert todo in answer.todo


def test_a_run_that_a_person_asked_for_may_be_late_as_well() -> None:
    answer = judge([timetable(is_scheduled=False, planned=None, due=DUE)], "night", NOW)
    assert answer.state is State.WARN


def test_only_the_late_deployment_is_named_and_a_full_page_counts_as_or_more() -> None:
    well, ill = timetable(), timetable(name="release/night", due=(NOW - LATE,) * PAGE)
    answer = judge([well, ill], "night", NOW)
    assert answer.message.startswith(f"late runs of release/night: {PAGE} or more, ")
    assert NAME not in answer.message


def test_the_advice_is_printed_once() -> None:
    names = (NAME, "collect-garbage/night")
    answer = judge([timetable(name=name, planned=None) for name in names], "night", NOW)
    assert all(name in answer.message for name in names)
    assert answer.todo.count("schedule_deployments") == 1


def test_the_newest_due_time_without_a_run_fails_if_none_ran() -> None:
    yesterday = NOW - timedelta(days=1)
    never = judge([timetable(missed=(yesterday,), is_never_run=True)], "night", NOW)
    assert (never.state, never.exit_status) == (State.FAIL, InfrastructureError.exit_status)
    message = f"{NAME} was due at 2026-11-22 03:00 UTC and has no run of that time"
    assert never.message.startswith(message)
    assert f"prefect deployment run {NAME}" in never.todo
    once = judge([timetable(missed=(yesterday,))], "night", NOW)
    assert (once.state, once.message) == (State.WARN, never.message)


def test_a_schedule_that_differs_from_the_profile_is_registered_again() -> None:
    answer = judge([timetable(differs="its schedule is none")], "night", NOW)
    assert (answer.state, answer.message) == (State.WARN, f"{NAME}: its schedule is none")
    assert answer.todo == "python -m flows.register --profile night corrects it"
