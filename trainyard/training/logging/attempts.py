"""Time spent by each attempt at a run: attempts.json in the run folder; until the run is finished,
a document of each attempt in the work folder. No part of the result of a run.

    [{"began": 1795282123.481, "ranks": 8, "from_step": 500, "restore_seconds": 12.3,
      "loop_began": 1795282151.0, "marks": [MARK, ...], "ended": 1795285840.2,
      "outcome": "finished"}, ...]

    MARK: {"step": 600, "time": 1795282391.7, "compile": 21.4, "step_seconds": 201.2,
           "data_wait": 0.8, "evaluation": 9.9, "checkpoint": 4.1}

A mark is written at every save, with the seconds since the mark before. An attempt that is killed
loses only the time after its last mark. Times are seconds since 1970. `outcome` is missing if the
attempt was killed. flows/goodput/account.py sums up all attempts, with the time in queues."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.run.run_folder import RunFolder

log = logging.getLogger(__name__)

FILE = "attempts.json"

KEY = "attempt-{:04d}"
"""Key of the remembered document of an attempt, by its number from 1."""

SETTLED_AFTER = 3
"""Steps after which the first step of an attempt is compared with the others. Its additional time
counts as compilation of kernels and layers."""

MOST_MARKS = 256
"""Limit of marks. Beyond it the older half is merged in pairs: later attempts resume at one of the
last steps, and a document of all saves of a long run would take long to write."""

SPENT = ("compile", "step_seconds", "data_wait", "evaluation", "checkpoint")


class Attempt(Callback):
    """This attempt; on every rank, but only rank 0 writes the document.

    It wraps the checkpointing callback (`wrap`), and measures how long that blocks training."""

    def __init__(
        self, folder: RunFolder | None, ranks: int, intervals: Sequence[int | None]
    ) -> None:
        """intervals: of the saves, in steps."""
        self._folder = folder
        self._intervals = [interval for interval in intervals if interval is not None]
        self._earlier = _earlier(folder)
        self._document: dict[str, Any] = {"began": _now(), "ranks": ranks}
        self._marks: list[dict[str, float]] = []
        self._saving = Callback()
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._num_timed = 0
        self._steps: list[float] = []
        """Seconds of the first steps of this attempt, without waits for data."""
        self._since = time.monotonic()

    def restored(self, seconds: float) -> None:
        """Record the time of loading an earlier step."""
        self._document["restore_seconds"] = round(seconds, 3)

    def wrap(self, saving: Callback) -> Callback:
        """A callback that calls and times the given one."""
        self._saving = saving
        return self

    # --- callback -----------------------------------------------------------------------------

    def begin(self, state: TrainState) -> None:
        """Record the start of the loop."""
        self._saving.begin(state)
        self._document |= {"from_step": state.step, "loop_began": _now()}
        self._since = time.monotonic()
        self._write()

    def after_step(self, event: StepEvent) -> None:
        """Record the time of the step, call the wrapped callback, record its time."""
        now = time.monotonic()
        rest = now - self._since
        if event.timing is not None:
            waited = event.timing.data_wait_ms / 1e3
            computed = max(event.timing.ms / 1e3 - waited, 0.0)
            self._spent["data_wait"] += waited
            self._spent["step_seconds"] += computed
            self._record_first(computed)
            rest -= event.timing.ms / 1e3
        if event.record.validation_loss is not None:
            self._spent["evaluation"] += max(rest, 0.0)
        self._saving.after_step(event)
        self._since = time.monotonic()
        self._spent["checkpoint"] += self._since - now
        step = event.record.step
        is_saved = any(step % interval == 0 for interval in self._intervals)
        if is_saved or event.is_last or event.is_stopping or self._num_timed == SETTLED_AFTER:
            self._mark(step)

    def end(self) -> None:
        """Record the wait for the last save."""
        began = time.monotonic()
        self._saving.end()
        self._spent["checkpoint"] += time.monotonic() - began
        if self._marks:
            self._mark(int(self._marks[-1]["step"]))

    def failed(self) -> None:
        """Record the failure. The time since the last mark is lost."""
        self._saving.failed()
        self.ended("failed")

    def ended(self, outcome: str) -> None:
        """Record the outcome: finished, stopped, paused or failed."""
        self._document |= {"ended": _now(), "outcome": outcome}
        self._write()

    def publish(self) -> None:
        """Write attempts.json of all attempts; the run is finished."""
        self.ended("finished")
        if self._folder is not None:
            self._folder.write_volatile(FILE, [*self._earlier, self._whole()])

    # --- document -----------------------------------------------------------------------------

    def _record_first(self, seconds: float) -> None:
        """Count the additional time of the first step as compilation."""
        self._num_timed += 1
        if self._num_timed > SETTLED_AFTER:
            return
        self._steps.append(seconds)
        if self._num_timed == SETTLED_AFTER:
            longer = max(self._steps[0] - statistics.median(self._steps[1:]), 0.0)
            moved = min(longer, self._spent["step_seconds"])
            self._spent["compile"] += moved
            self._spent["step_seconds"] -= moved

    def _mark(self, step: int) -> None:
        spent = {name: round(seconds, 3) for name, seconds in self._spent.items()}
        self._marks = bounded([*self._marks, {"step": step, "time": _now(), **spent}])
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._write()

    def _whole(self) -> dict[str, Any]:
        return {**self._document, "marks": self._marks}

    def _write(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.remember(KEY.format(len(self._earlier) + 1), self._whole())
        except TrainyardError as error:  # no reason to end a training
            log.warning("cannot record the time of this attempt: %s", error)


def bounded(marks: list[dict[str, float]], most: int = MOST_MARKS) -> list[dict[str, float]]:
    """At most `most` marks with the same total: the older half is merged in pairs."""
    if len(marks) <= most:
        return marks
    older, newer = marks[: len(marks) // 4 * 2], marks[len(marks) // 4 * 2 :]
    pairs = zip(older[::2], older[1::2], strict=True)
    joined = [b | {name: round(a[name] + b[name], 3) for name in SPENT} for a, b in pairs]
    return joined + newer


def _earlier(folder: RunFolder | None) -> list[dict[str, Any]]:
    """The documents of earlier attempts, in order."""
    if folder is None:
        return []
    found: list[dict[str, Any]] = []
    while (document := folder.remembered(KEY.format(len(found) + 1))) is not None:
        found.append(document)
    return found


def _now() -> float:
    return round(time.time(), 3)
