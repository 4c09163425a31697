"""A submission that waits for room: how long, and how often that is said."""

from __future__ import annotations

import logging

import pytest

from flows.backends.backoff import AGAIN_SECONDS, NoRoomError, SubmitBackoff

FULL = NoRoomError("exceeded quota: yard")
LOG = logging.getLogger(__name__)


def test_it_waits_as_long_as_it_may_and_then_says_what_was_in_the_way() -> None:
    room = SubmitBackoff("merge", 100, LOG)
    assert room.pause(FULL, 1000.0, 30.0) == 30.0
    assert room.pause(FULL, 1090.0, 30.0) == 10.0
    with pytest.raises(NoRoomError, match=r"exceeded quota: yard; no room came in 100 s"):
        room.pause(FULL, 1100.0, 30.0)


def test_it_is_said_once_and_then_rarely(caplog: pytest.LogCaptureFixture) -> None:
    room = SubmitBackoff("merge", None, LOG)
    for minute in range(121):
        assert room.pause(FULL, minute * 60.0, 30.0) == 30.0
    assert len(caplog.records) == 1 + 120 * 60 // AGAIN_SECONDS
    assert "merge waits to be submitted: exceeded quota: yard" in caplog.text
