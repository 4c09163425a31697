"""How long retries last, and how often a waiting submission is logged."""

from __future__ import annotations

import logging

import pytest

from flows.backends.backoff import REPEAT_SECONDS, SubmitBackoff, pauses
from flows.backends.errors import NoRoomError

FULL = NoRoomError("exceeded quota: yard")
LOG = logging.getLogger(__name__)


def test_it_waits_up_to_the_limit_and_then_names_the_obstacle() -> None:
    room = SubmitBackoff("merge", 100, LOG)
    assert room.pause(FULL, 1000.0, 30.0) == 30.0
    assert room.pause(FULL, 1090.0, 30.0) == 10.0
    with pytest.raises(NoRoomError, match=r"exceeded quota: yard; there was no room for 100 s"):
        room.pause(FULL, 1100.0, 30.0)


def test_the_warning_is_logged_once_and_then_rarely(caplog: pytest.LogCaptureFixture) -> None:
    room = SubmitBackoff("merge", None, LOG)
    for minute in range(121):
        assert room.pause(FULL, minute * 60.0, 30.0) == 30.0
    assert len(caplog.records) == 1 + 120 * 60 // REPEAT_SECONDS
    assert "merge waits to be submitted: exceeded quota: yard" in caplog.text


def test_patience_is_spent_and_not_much_more() -> None:
    planned = list(pauses(120.0))
    assert planned[0] == 0.0
    assert planned[1] < 1 < planned[3] < planned[-1] < 20
    assert 120 <= sum(planned) < 140
    assert list(pauses(0.0)) == [0.0]
