"""Checks that run one after another, each within a time limit, and their findings.

A check returns an answer, or raises one of our errors, whose message becomes the answer. A check
that exceeds its limit fails, so no check blocks the next ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from trainyard.errors import EXIT_DEFECT, ConfigError, InfrastructureError, TrainyardError

Y = TypeVar("Y")

log = logging.getLogger(__name__)

PAGE = "docs/troubleshooting.md"


class State(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    """It works, but will cause trouble."""
    FAIL = "fail"
    SKIPPED = "skipped"
    """Not checked; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found, and what to do."""

    state: State
    message: str
    todo: str = ""
    exit_status: int = 0
    """Exit status of a failure: 2 if a setting has to change, 3 if it may pass by itself."""


def ok(message: str) -> CheckResult:
    """The check passed."""
    return CheckResult(State.OK, message)


def warn(message: str, todo: str) -> CheckResult:
    """It works, but will cause trouble."""
    return CheckResult(State.WARN, message, todo)


def skipped(why: str) -> CheckResult:
    """Not checked."""
    return CheckResult(State.SKIPPED, why)


def fail(kind: type[TrainyardError], message: str, todo: str) -> CheckResult:
    """A failed check; kind: the error class, which shows whether the failure is transient."""
    return CheckResult(State.FAIL, message, todo, kind.exit_status)


@dataclass(frozen=True, slots=True)
class Check(Generic[Y]):
    """One check of a yard of type Y."""

    name: str
    look: Callable[[Y], CheckResult]
    section: str
    """Anchor in docs/troubleshooting.md."""
    needs: tuple[str, ...] = ()
    """Checks without which this one is skipped."""
    limit_seconds: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check and its answer."""

    name: str
    state: State
    message: str
    todo: str
    see: str
    """Page and anchor; empty if the check passed."""
    exit_status: int
    seconds: float

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self.name,
            "state": self.state,
            "told": self.message,
            "todo": self.todo,
            "see": self.see,
            "exit_status": self.exit_status,
            "seconds": self.seconds,
        }


def examine_yard(checks: Sequence[Check[Y]], yard: Y) -> Iterator[Finding]:
    """Yield each finding as soon as it is known."""
    states: dict[str, State] = {}
    for check in checks:
        missing = [n for n in check.needs if states.get(n) in (State.FAIL, State.SKIPPED)]
        began = time.monotonic()
        if missing:
            why = f"{missing[0]} {'failed' if states[missing[0]] is State.FAIL else 'was skipped'}"
            answer = skipped(why)
        else:
            answer = _look(check, yard)
        states[check.name] = answer.state
        is_ill = answer.state in (State.WARN, State.FAIL)
        yield Finding(
            name=check.name,
            state=answer.state,
            message=answer.message,
            todo=answer.todo,
            see=f"{PAGE}#{check.section}" if is_ill else "",
            exit_status=answer.exit_status,
            seconds=round(time.monotonic() - began, 3),
        )


def _look(check: Check[Y], yard: Y) -> CheckResult:
    """The answer within the limit; runs in a thread, because name look-ups and mounts may hang."""
    answers: list[CheckResult] = []
    thread = threading.Thread(
        target=lambda: answers.append(_answer(check, yard)), name=check.name, daemon=True
    )
    thread.start()
    thread.join(check.limit_seconds)
    if answers:
        return answers[0]
    return fail(
        InfrastructureError,
        f"no answer within {check.limit_seconds:.0f} s",
        "something it needs hangs: a dead mount, a name server, a firewall that drops packets",
    )


def _answer(check: Check[Y], yard: Y) -> CheckResult:
    try:
        return check.look(yard)
    except TrainyardError as error:
        return CheckResult(State.FAIL, str(error), "", error.exit_status)
    except OSError as error:
        return CheckResult(State.FAIL, f"{type(error).__name__}: {error}", "", 3)
    except Exception as error:  # this check is broken; the next ones may not be
        log.debug("check %s", check.name, exc_info=True)
        message = f"defect of trainyard in this check: {type(error).__name__}: {error}"
        return CheckResult(State.FAIL, message, "report it", EXIT_DEFECT)


def worst(findings: Sequence[Finding]) -> int:
    """The exit status: 70 if a check is broken, else 2 if a setting is wrong, else 3 if something
    else failed, else 0."""
    statuses = {finding.exit_status for finding in findings} - {0}
    first = (status for status in (EXIT_DEFECT, ConfigError.exit_status) if status in statuses)
    return next(first, InfrastructureError.exit_status) if statuses else 0
