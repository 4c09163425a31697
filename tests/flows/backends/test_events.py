"""What a block notes of a submission."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flows.backends.events import FILE, read_events, record_event


def test_recorded_events_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "attempt-7"
    before = time.time()
    assert record_event(folder, "submitted", job="17")
    assert record_event(folder, "started", at=5.25)
    assert record_event(folder, "ended", kind="done")
    submitted, started, ended = read_events(folder)
    assert before - 0.001 <= submitted.time <= time.time() + 0.001
    assert (submitted.facts, submitted.attempt) == ({"job": "17"}, "attempt-7")
    assert (started.event, started.time) == ("started", 5.25)
    assert ended.facts == {"kind": "done"}


def test_an_unchanged_state_is_not_recorded(tmp_path: Path) -> None:
    names = ("queued", "queued", "started", "reattached", "started", "queued", "started", "ended")
    noted = [record_event(tmp_path, name) for name in names]  # type: ignore[arg-type]
    assert noted == [True, False, True, True, False, True, True, True]
    assert not record_event(tmp_path, "started")  # a job that ended does not begin again
    assert [event.event for event in read_events(tmp_path)].count("started") == 2


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    record_event(tmp_path, "submitted")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "star')
    assert [event.event for event in read_events(tmp_path)] == ["submitted"]
    assert read_events(tmp_path / "nowhere") == []


def test_an_event_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not one of submitted, queued"):
        record_event(tmp_path, "begun")  # type: ignore[arg-type]
