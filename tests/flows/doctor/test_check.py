"""Checks one after another: what waits for what, what hangs, what a whole visit ends with."""

from __future__ import annotations

import threading
import time

import pytest

from flows.doctor.check import (
    Check,
    CheckResult,
    State,
    examine_yard,
    fail,
    ok,
    skipped,
    warn,
    worst,
)
from flows.doctor.command import CHECKS, chosen_checks, print_finding
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError


def check(name: str, answer: CheckResult | Exception, *needs: str) -> Check[None]:
    def look(_: None) -> CheckResult:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Check(name, look, "somewhere", needs)


def test_a_check_that_is_asked_for_brings_those_that_it_needs() -> None:
    """`--only schedules` alone started a Prefect server without a password, and left it behind."""
    found = [one.name for one in chosen_checks(["schedules", "store"])]
    assert found == ["store", "Prefect", "versions", "schedules"]


def test_only_checks_that_need_a_failed_one_are_skipped() -> None:
    checks = [
        check("a", fail(InfrastructureError, "down", "start it")),
        check("b", ok("fine"), "a"),
        check("c", ok("fine"), "b"),
        check("d", ok("fine")),
        check("e", warn("slow", "wait")),
        check("f", ok("fine"), "e"),
    ]
    found = {finding.name: finding for finding in examine_yard(checks, None)}
    states = [found[name].state for name in "abcdef"]
    assert states == ["fail", "skipped", "skipped", "ok", "warn", "ok"]
    assert (found["b"].message, found["c"].message) == ("a failed", "b was skipped")
    assert found["a"].see == "docs/troubleshooting.md#somewhere"
    assert found["d"].see == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("wrong"), 2),
        (InfrastructureError("away"), 3),
        (ArtifactError("torn"), 1),
        (OSError("no disk"), 3),
        (KeyError("our own fault"), 70),
    ],
)
def test_an_error_is_an_answer(error: Exception, status: int) -> None:
    (found,) = examine_yard([check("a", error)], None)
    assert (found.state, found.exit_status) == (State.FAIL, status)
    assert str(error) in found.message
    assert worst([found]) == (status if status != 1 else 3)


def test_a_hanging_check_does_not_delay_the_others() -> None:
    never = threading.Event()

    def hang(_: None) -> CheckResult:
        never.wait(20)
        return ok("late")

    began = time.monotonic()
    checks = [Check("hangs", hang, "somewhere", (), 0.05), check("next", ok("fine"))]
    hung, after = examine_yard(checks, None)
    never.set()
    assert time.monotonic() - began < 5
    assert (hung.state, hung.exit_status) == (State.FAIL, InfrastructureError.exit_status)
    assert "no answer within" in hung.message
    assert after.state is State.OK


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([ok(""), warn("", ""), skipped("")], 0),
        ([ok(""), fail(InfrastructureError, "", "")], 3),
        ([fail(InfrastructureError, "", ""), fail(ConfigError, "", "")], 2),
        ([fail(ConfigError, "", ""), CheckResult(State.FAIL, "", "", 70)], 70),
    ],
)
def test_a_wrong_setting_outranks_a_temporary_failure(
    answers: list[CheckResult], status: int
) -> None:
    checks = [check(str(number), answer) for number, answer in enumerate(answers)]
    assert worst(list(examine_yard(checks, None))) == status


def test_needs_name_checks_that_come_before() -> None:
    names = [one.name for one in CHECKS]
    assert len(set(names)) == len(names)
    for number, one in enumerate(CHECKS):
        assert set(one.needs) <= set(names[:number])
        assert 0 < one.limit_seconds <= 900


def test_a_finding_names_the_fix_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = examine_yard([check("disk", warn("9 GiB " * 30, "free some"))], None)
    print_finding(found)
    stdout = capsys.readouterr().out
    assert stdout.startswith("disk                warn     9 GiB 9 GiB")
    assert "-> free some" in stdout
    assert "see docs/troubleshooting.md#somewhere" in stdout
    assert all(len(line) <= 120 for line in stdout.splitlines())
    assert "\033" not in stdout
