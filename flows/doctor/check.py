"""Checks one after another, each within its time, and what came of each.

A check answers, or raises one of our errors, whose words are the answer then. One that does not
come back is a failure of its own: no check holds up those behind it."""

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
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    """It works, and will hurt."""
    FAIL = "fail"
    SKIPPED = "skipped"
    """Not looked at; why is said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a check found."""

    state: State
    told: str
    todo: str = ""
    exit_status: int = 0
    """Of a failure: 2 where somebody has to change a setting, 3 where it may pass by itself."""


def ok(told: str) -> Answer:
    """All is well."""
    return Answer(State.OK, told)


def warn(told: str, todo: str) -> Answer:
    """It works, and will hurt."""
    return Answer(State.WARN, told, todo)


def skipped(why: str) -> Answer:
    """Not looked at."""
    return Answer(State.SKIPPED, why)


def fail(kind: type[TrainyardError], told: str, todo: str) -> Answer:
    """It does not work; `kind` says whether it may by itself, later."""
    return Answer(State.FAIL, told, todo, kind.exit_status)


@dataclass(frozen=True, slots=True)
class Check(Generic[Y]):
    """One thing to look at in a yard of type Y."""

    name: str
    look: Callable[[Y], Answer]
    section: str
    """Anchor of the page that tells more."""
    needs: tuple[str, ...] = ()
    """Checks without whose good end this one has nothing to look at."""
    limit_seconds: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check and its answer."""

    name: str
    state: State
    told: str
    todo: str
    see: str
    """Page and anchor; empty for what is well."""
    exit_status: int
    seconds: float

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: getattr(self, name) for name in Finding.__slots__}


def examine_yard(checks: Sequence[Check[Y]], yard: Y) -> Iterator[Finding]:
    """The findings, one as soon as it is there."""
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
            told=answer.told,
            todo=answer.todo,
            see=f"{PAGE}#{check.section}" if is_ill else "",
            exit_status=answer.exit_status,
            seconds=round(time.monotonic() - began, 3),
        )


def _look(check: Check[Y], yard: Y) -> Answer:
    """The answer, whatever happens. A thread: name look-ups and dead mounts know no time-out."""
    answers: list[Answer] = []
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
        "something behind it hangs: a dead mount, a name server, a firewall that drops packets",
    )


def _answer(check: Check[Y], yard: Y) -> Answer:
    try:
        return check.look(yard)
    except TrainyardError as error:
        return Answer(State.FAIL, str(error), "", error.exit_status)
    except OSError as error:
        return Answer(State.FAIL, f"{type(error).__name__}: {error}", "", 3)
    except Exception as error:  # this check is broken, and those behind it are not
        log.debug("check %s", check.name, exc_info=True)
        told = f"defect of trainyard in this check: {type(error).__name__}: {error}"
        return Answer(State.FAIL, told, "report it", EXIT_DEFECT)


def worst(findings: Sequence[Finding]) -> int:
    """The exit status of all: 70 where a check is broken, 2 where a setting is wrong, 3 where
    something else failed, 0."""
    statuses = {finding.exit_status for finding in findings} - {0}
    told = (status for status in (EXIT_DEFECT, ConfigError.exit_status) if status in statuses)
    return next(told, InfrastructureError.exit_status) if statuses else 0
