"""Counts the failed attempts at a stage, and computes the pause before the next one.

stage_task.py decides whether there is a next one: after failures of the infrastructure, until
`fruitless_attempts` of the profile fail in a row without progress. A failure that repeats at the
same step is not bad luck. Attempts with progress are not limited: a training of a month is
preempted more often than any fixed number. Each attempt resumes from the last verified
checkpoint."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

from flows.backends.outcome import Outcome
from flows.recipes.stage_job import STEP_MANIFEST, StageJob
from trainyard.artifacts import store
from trainyard.artifacts.urls import local_path
from trainyard.errors import TrainyardError

PAUSES_SECONDS = (5.0, 30.0, 120.0, 300.0)
"""After the first failed attempt, the second, ...; the last one repeats. Progress starts the count
again, so a job that is preempted daily does not wait longer each day.

Prefect's delays count retries from the beginning of the task. So Prefect retries at once, and the
task begins with the pause."""
JITTER = 0.2
"""Most by which a pause is longer, as a share of it: jobs that fail together return one by one."""
MOST_RETRIES = 100_000
"""Prefect requires a limit; this one is never reached. A stage that waits for the claim of another
run uses one retry per pause, so it lasts for a year."""

CLAIM_HELD = "ClaimHeldError"
"""Error of a stage whose output another living run is writing. Waiting for it is no attempt."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FailedAttempts:
    """The failed attempts at one job."""

    fruitless: int = 0
    """The last ones, in a row, without progress."""
    furthest: int | None = None
    """The highest step that an attempt published."""
    pause_seconds: float = 0.0
    """Before the next attempt."""
    last: Outcome | None = None
    """How the last one ended."""
    _failed: int = 0
    """Failures in a row since the last progress, with the attempt that made it."""
    _held: int = 0
    """Attempts in a row that found the output claimed by another run."""

    def record(self, step: int | None) -> None:
        """Record a failed attempt; step: how far the job is now, None for a job without steps."""
        if step is not None and (self.furthest is None or step > self.furthest):
            self.furthest, self.fruitless, self._failed = step, 0, 0
        else:
            self.fruitless += 1
        self._failed, self._held = self._failed + 1, 0
        self.pause_seconds = pause_seconds(self._failed)

    def record_claim_held(self) -> None:
        """Record that another run is writing the output, so this was no attempt."""
        self._held += 1
        self.pause_seconds = pause_seconds(self._held)


def pause_seconds(count: int) -> float:
    """The pause after the n-th failure in a row, counted from 1."""
    return PAUSES_SECONDS[min(count, len(PAUSES_SECONDS)) - 1]


def with_jitter(seconds: float) -> float:
    """A pause, up to JITTER of it longer."""
    return seconds * random.uniform(1.0, 1.0 + JITTER)


def reached_step(job: StageJob, outcome: Outcome) -> int | None:
    """How far a job is: its last published step, as later ones are lost; None if that is unknown,
    such as while the store cannot be read. Of an output on a disk that this program does not see,
    the step that the failed stage reported."""
    if job.output is None or job.output.is_prefix:
        return outcome.step
    try:
        names = store.list_files(job.output.url)
    except TrainyardError as error:  # the very store may be what failed
        log.debug("cannot list the steps of %s: %s", job.output.url, error)
        return None
    folder = local_path(job.output.url)
    if folder is not None and not folder.exists():
        return outcome.step
    found = (STEP_MANIFEST.fullmatch(name) for name in names)
    return max((int(match[1]) for match in found if match is not None), default=None)


def no_retry_reason(attempts: FailedAttempts) -> str:
    """Why there is no further attempt, for the error and the log."""
    reached = "" if attempts.furthest is None else f" and none got beyond step {attempts.furthest}"
    failed = f"{attempts.fruitless} attempts in a row" if attempts.fruitless > 1 else "an attempt"
    return f"{failed} failed{reached}: not retried"
