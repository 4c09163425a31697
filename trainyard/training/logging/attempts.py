"""What each attempt at a run spent its time on: attempts.json in the run folder, and while the run
lasts a document of each attempt in its work folder. Never part of what a run makes.

    [{"began": 1795282123.481, "ranks": 8, "from_step": 500, "restore_seconds": 12.3,
      "loop_began": 1795282151.0, "marks": [MARK, ...], "ended": 1795285840.2,
      "outcome": "finished"}, ...]

    MARK: {"step": 600, "time": 1795282391.7, "compile": 21.4, "step_seconds": 201.2,
           "data_wait": 0.8, "evaluation": 9.9, "checkpoint": 4.1}

A mark is written whenever a step was saved, and holds the seconds since the mark before: an attempt
that is killed has told all but what came after its last one, and that is lost with it. Times are
seconds since 1970. `outcome` is missing where nobody was left to say it. What the seconds of all
attempts come to, together with the time in queues: flows/goodput/account.py."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.run_protocols import RunFolder

log = logging.getLogger(__name__)

FILE = "attempts.json"

KEY = "attempt-{:04d}"
"""Remembered: the document of an attempt, by its number from 1."""

SETTLED_AFTER = 3
"""Steps of an attempt after which the first is compared with the others: what it took longer is
counted as compilation, of kernels and of layers."""

MOST_MARKS = 256
"""So many are kept; of more the older half is made coarser, since later attempts begin again at one
of the last steps, and a document of all saves of a long run would be long to write."""

SPENT = ("compile", "step_seconds", "data_wait", "evaluation", "checkpoint")


class Attempt(Callback):
    """This attempt; on every rank, of which the first keeps the document.

    It stands in for the callback that saves (`around`), and measures how long that holds up
    training."""

    def __init__(
        self, keeper: RunFolder | None, ranks: int, intervals: Sequence[int | None]
    ) -> None:
        """intervals: of the saves, in steps."""
        self._keeper = keeper
        self._intervals = [interval for interval in intervals if interval is not None]
        self._earlier = _earlier(keeper)
        self._document: dict[str, Any] = {"began": _now(), "ranks": ranks}
        self._marks: list[dict[str, float]] = []
        self._saving = Callback()
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._num_timed = 0
        self._steps: list[float] = []
        """Seconds of the first steps of this attempt, waits for data left out."""
        self._since = time.monotonic()

    def restored(self, seconds: float) -> None:
        """Weights and state of an earlier step were loaded."""
        self._document["restore_seconds"] = round(seconds, 3)

    def around(self, saving: Callback) -> Callback:
        """The callback that does what the given one does, timed."""
        self._saving = saving
        return self

    # --- what the loop tells ------------------------------------------------------------------

    def begin(self, state: TrainState) -> None:
        """The loop begins; note how long it took to come here."""
        self._saving.begin(state)
        self._document |= {"from_step": state.step, "loop_began": _now()}
        self._since = time.monotonic()
        self._write()

    def after_step(self, event: StepEvent) -> None:
        """Note what the step took, have it saved, note what that took."""
        came = time.monotonic()
        rest = came - self._since
        if event.timing is not None:
            waited = event.timing.data_wait_ms / 1e3
            computed = max(event.timing.ms / 1e3 - waited, 0.0)
            self._spent["data_wait"] += waited
            self._spent["step_seconds"] += computed
            self._note_first(computed)
            rest -= event.timing.ms / 1e3
        if event.record.validation_loss is not None:
            self._spent["evaluation"] += max(rest, 0.0)
        self._saving.after_step(event)
        self._since = time.monotonic()
        self._spent["checkpoint"] += self._since - came
        step = event.record.step
        is_saved = any(step % interval == 0 for interval in self._intervals)
        if is_saved or event.is_last or event.is_stopping or self._num_timed == SETTLED_AFTER:
            self._mark(step)

    def end(self) -> None:
        """The last save is waited for."""
        came = time.monotonic()
        self._saving.end()
        self._spent["checkpoint"] += time.monotonic() - came
        if self._marks:
            self._mark(int(self._marks[-1]["step"]))

    def failed(self) -> None:
        """What was done since the last mark is lost."""
        self._saving.failed()
        self.ended("failed")

    def ended(self, outcome: str) -> None:
        """finished, stopped, paused or failed: the last word of this attempt."""
        self._document |= {"ended": _now(), "outcome": outcome}
        self._write()

    def publish(self) -> None:
        """Leave what all attempts at this run said in its folder; the run is finished."""
        self.ended("finished")
        if self._keeper is not None:
            self._keeper.write_volatile(FILE, [*self._earlier, self._whole()])

    # --- keeping ------------------------------------------------------------------------------

    def _note_first(self, seconds: float) -> None:
        """Take apart what the first step took, once there are others to compare it with."""
        self._num_timed += 1
        if self._num_timed > SETTLED_AFTER:
            return
        self._steps.append(seconds)
        if self._num_timed == SETTLED_AFTER:
            longer = max(self._steps[0] - statistics.median(self._steps[1:]), 0.0)
            taken = min(longer, self._spent["step_seconds"])
            self._spent["compile"] += taken
            self._spent["step_seconds"] -= taken

    def _mark(self, step: int) -> None:
        spent = {name: round(seconds, 3) for name, seconds in self._spent.items()}
        self._marks = bounded([*self._marks, {"step": step, "time": _now(), **spent}])
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._write()

    def _whole(self) -> dict[str, Any]:
        return {**self._document, "marks": self._marks}

    def _write(self) -> None:
        if self._keeper is None:
            return
        try:
            self._keeper.remember(KEY.format(len(self._earlier) + 1), self._whole())
        except TrainyardError as error:  # an account of times is nothing to end a training for
            log.warning("what this attempt spent its time on was not kept: %s", error)


def bounded(marks: list[dict[str, float]], most: int = MOST_MARKS) -> list[dict[str, float]]:
    """At most so many marks that tell of as much time: neighbours of the older half as one."""
    if len(marks) <= most:
        return marks
    older, newer = marks[: len(marks) // 4 * 2], marks[len(marks) // 4 * 2 :]
    pairs = zip(older[::2], older[1::2], strict=True)
    joined = [b | {name: round(a[name] + b[name], 3) for name in SPENT} for a, b in pairs]
    return joined + newer


def _earlier(keeper: RunFolder | None) -> list[dict[str, Any]]:
    """What the attempts before this one left, in order."""
    if keeper is None:
        return []
    found: list[dict[str, Any]] = []
    while (document := keeper.remembered(KEY.format(len(found) + 1))) is not None:
        found.append(document)
    return found


def _now() -> float:
    return round(time.time(), 3)
