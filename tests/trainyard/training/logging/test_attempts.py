"""What an attempt keeps of its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import pytest

from trainyard.errors import InfrastructureError
from trainyard.training.logging.attempts import FILE, KEY, SPENT, Attempt, bounded
from trainyard.training.loop.events import Callback, NextStep, StepEvent
from trainyard.training.loop.ledger import Ledger, StepRecord
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.throughput import StepTiming
from trainyard.training.run.run_folder import RunFolder


class Kept:
    """A run folder that remembers."""

    def __init__(self) -> None:
        self.documents: dict[str, Any] = {}
        self.written: dict[str, Any] = {}
        self.is_away = False

    def remembered(self, key: str) -> dict[str, Any] | None:
        return cast("dict[str, Any] | None", self.documents.get(key))

    def remember(self, key: str, document: Mapping[str, Any]) -> None:
        if self.is_away:
            raise InfrastructureError("the store is away")
        self.documents[key] = {**document, "marks": list(document["marks"])}

    def write_volatile(self, name: str, document: Any) -> None:
        self.written[name] = document


class Slow(Callback):
    """Saves for a while."""

    def after_step(self, event: StepEvent) -> None:
        time.sleep(0.02)


def event(step: int, ms: float | None, wait_ms: float = 0.0, **info: Any) -> StepEvent:
    record = StepRecord(step, step, step, validation_loss=info.pop("loss", None))
    timing = None if ms is None else StepTiming(step, ms, 1.0, 1.0, wait_ms, 0)
    flags = {"is_last": False, "is_stopping": False, **info}
    return StepEvent(record, timing, NextStep(1.0), TrainState(), Ledger(), **flags)


def attempt(kept: Kept, *intervals: int | None) -> Attempt:
    made = Attempt(cast(RunFolder, kept), 4, intervals)
    made.wrap(Slow())
    made.begin(TrainState())
    return made


def mark(kept: Kept, number: int = 1, place: int = -1) -> dict[str, float]:
    found: dict[str, float] = kept.documents[KEY.format(number)]["marks"][place]
    return found


def test_marks_at_saves_have_the_time_spent_since_the_last_one() -> None:
    kept = Kept()
    made = attempt(kept, 5, None)
    for step in range(1, 8):
        made.after_step(event(step, 100.0, wait_ms=10.0))
    assert [m["step"] for m in kept.documents["attempt-0001"]["marks"]] == [3, 5]
    last = mark(kept)
    assert (last["step_seconds"], last["data_wait"], last["compile"]) == (0.18, 0.02, 0.0)
    assert 0.04 <= last["checkpoint"] < 1.0
    assert last["evaluation"] == 0.0


def test_the_additional_time_of_the_first_step_is_compilation() -> None:
    kept = Kept()
    made = attempt(kept, None)
    for step, ms in enumerate((5000.0, 90.0, 110.0), 1):
        made.after_step(event(step, ms))
    assert mark(kept)["compile"] == pytest.approx(4.9)
    assert mark(kept)["step_seconds"] == pytest.approx(0.3)


def test_the_time_of_a_validation_excludes_the_step() -> None:
    kept = Kept()
    made = attempt(kept, 1)
    time.sleep(0.05)
    made.after_step(event(1, 10.0, loss=2.0))
    assert 0.04 <= mark(kept)["evaluation"] < 1.0
    time.sleep(0.05)
    made.after_step(event(2, 10.0))
    assert mark(kept)["evaluation"] == 0.0


def test_attempts_are_numbered_and_published_together() -> None:
    kept = Kept()
    first = attempt(kept, 10)
    first.after_step(event(1, 10.0, is_stopping=True))
    first.end()
    first.ended("stopped")
    second = attempt(kept, 10)
    second.restored(1.5)
    second.after_step(event(2, 10.0, is_last=True))
    second.publish()
    assert list(kept.documents) == ["attempt-0001", "attempt-0002"]
    earlier, own = kept.written[FILE]
    assert (earlier["outcome"], own["outcome"]) == ("stopped", "finished")
    assert (own["restore_seconds"], own["ranks"], own["from_step"]) == (1.5, 4, 0)
    assert own["began"] <= own["loop_began"] <= own["marks"][0]["time"] <= own["ended"]


def test_a_failure_is_the_outcome_of_an_attempt() -> None:
    kept = Kept()
    attempt(kept, 10).failed()
    assert kept.documents["attempt-0001"]["outcome"] == "failed"
    assert kept.documents["attempt-0001"]["marks"] == []


def test_an_unavailable_store_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    made = attempt(kept, 1)
    kept.is_away = True
    with caplog.at_level(logging.WARNING):
        made.after_step(event(1, 10.0))
    assert "cannot record the time of this attempt: the store is away" in caplog.text
    kept.is_away = False
    made.after_step(event(2, 10.0))
    assert [m["step"] for m in kept.documents["attempt-0001"]["marks"]] == [1, 2]


@pytest.mark.parametrize("count", [3, 4, 5, 40])
def test_old_marks_are_merged_and_keep_their_total_time(count: int) -> None:
    marks: list[dict[str, float]] = []
    for step in range(1, count + 1):
        one = {"step": step, "time": float(step), **dict.fromkeys(SPENT, 0.25)}
        marks = bounded([*marks, one], most=4)
        assert len(marks) <= 4
    for name in SPENT:
        assert sum(mark[name] for mark in marks) == 0.25 * count
    steps = [mark["step"] for mark in marks]
    assert steps == sorted(set(steps))
    assert steps[-2:] == [count - 1, count]


def test_ranks_without_a_folder_write_nothing() -> None:
    made = Attempt(None, 4, (1,))
    made.wrap(Slow())
    made.begin(TrainState())
    made.after_step(event(1, 10.0))
    made.publish()
