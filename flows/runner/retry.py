"""Whether a stage that failed is tried again, and after how long.

Only what infrastructure did is tried again: the stage itself goes on from its last verified
checkpoint. A fault that looks like bad luck and comes back each time is none, so attempts that get
no further than those before them are counted, and end the trying. Attempts that do get further may
be as many as it takes: a training of a month is preempted more often than any fixed number."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

from flows.backends.outcome import Outcome
from flows.recipes.stage_job import STEP_MANIFEST, StageJob
from trainyard.artifacts import store
from trainyard.errors import TrainyardError

PAUSES_SECONDS = (5.0, 30.0, 120.0, 300.0)
"""After the first attempt that failed, the second, ...; the last also after all that follow. An
attempt that got further is the first again: what is preempted daily waits no longer each day.

Prefect counts a task's retries from its beginning, and knows no other delays than by that count. So
it tries again at once, and the task begins with the pause."""
JITTER = 0.2
"""By so much of it a pause may be longer: jobs that fell together do not come back together."""
MOST_RETRIES = 100_000
"""Prefect wants a number; it is never what ends the trying. Who waits for another run's claim, at a
pause each time, waits for a year."""

HELD = "ClaimHeldError"
"""Of a stage whose output another run is writing, and is alive: waiting for it is no attempt."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Trying:
    """The attempts at one job, as far as they have failed."""

    fruitless: int = 0
    """In a row, up to the last one."""
    furthest: int | None = None
    """Step that any of them reached."""
    pause_seconds: float = 0.0
    """Before the next one."""
    _failed: int = 0
    """In a row, that which got further among them."""
    _held: int = 0
    """In a row, that found another run at work."""

    def note(self, step: int | None) -> None:
        """An attempt has failed; `step` is how far the job is now, None where it has no steps."""
        if step is not None and (self.furthest is None or step > self.furthest):
            self.furthest, self.fruitless, self._failed = step, 0, 0
        else:
            self.fruitless += 1
        self._failed, self._held = self._failed + 1, 0
        self.pause_seconds = pause_seconds(self._failed)

    def note_held(self) -> None:
        """Another run is writing the output: that is no attempt."""
        self._held += 1
        self.pause_seconds = pause_seconds(self._held)


def pause_seconds(count: int) -> float:
    """After the n-th failure in a row, from 1."""
    return PAUSES_SECONDS[min(count, len(PAUSES_SECONDS)) - 1]


def with_jitter(seconds: float) -> float:
    """A pause, up to JITTER of it longer."""
    return seconds * random.uniform(1.0, 1.0 + JITTER)


def reached_step(job: StageJob, outcome: Outcome) -> int | None:
    """How far a job is: its last published step. What a failed stage told of its steps counts where
    nothing of its run folder can be seen from here: they are lost that were not published."""
    told = outcome.step
    if job.output is not None and not job.output.is_prefix:
        try:
            names = store.list_files(job.output.url)
        except TrainyardError as error:  # the very store may be what failed
            log.debug("steps of %s not seen: %s", job.output.url, error)
            names = {}
        found = (STEP_MANIFEST.fullmatch(name) for name in names)
        steps = [int(match[1]) for match in found if match is not None]
        return max(steps, default=None) if names else told
    return told


def given_up(trying: Trying) -> str:
    """Why there is no further attempt, in words."""
    reached = "" if trying.furthest is None else f" and none got beyond step {trying.furthest}"
    failed = f"{trying.fruitless} attempts in a row" if trying.fruitless > 1 else "an attempt"
    return f"{failed} failed{reached}: not tried again"
