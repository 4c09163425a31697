"""One submission, from its beginning until its end is known, and noted in its run folder.

Who runs it may be away for longer than a block asks again: a weekend of maintenance, a control
plane that is replaced. Nothing of the stage has failed then, and its job may go on. So it is looked
for again for as long as it takes, within one attempt. What does not answer before there is a job
may not be there at all; that is for the attempts to count (flows/runner/retry.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from flows.backends.base import StageJobRun
from flows.backends.container.client import RECORD
from flows.backends.errors import BackendUnavailableError
from flows.backends.outcome import Kind, Outcome
from flows.backends.run_folder import (
    SUBMITTED,
    Ending,
    read_ending,
    read_record,
    run_folder_io,
    write_ending,
    write_record,
)
from flows.backends.spec import LaunchSpec
from flows.logs.console import headline
from flows.pages.progress import progress_shown
from flows.pages.stage_pages import show_submitted, show_waiting
from flows.runner.blocks import BLOCKS
from flows.runner.retry import pause_seconds, with_jitter
from flows.yard.profile import SCHEDULED, StageEnvironment
from trainyard.errors import TrainyardError

SETTLED = "settled.json"
"""File of a run folder of a scheduler's job: its end is known, the next submission is another."""

ENDED_BY_HAND = {
    "container": (RECORD, "docker rm --force {name}"),
    "slurm": (SUBMITTED, "scancel {job_id}"),
    "kubernetes": (SUBMITTED, "kubectl --namespace {namespace} delete {kind} {name}"),
}
"""Where a block notes that it has submitted a job, and how a person ends what is noted."""

AGAIN_SECONDS = 3600.0
"""After which a stage whose job still cannot be seen says so again."""
LOOK_SECONDS = 1.0
"""Between two looks whether a place answers again."""


async def follow(stage: str, place: StageEnvironment, spec: LaunchSpec) -> Outcome:
    """Start the job of a run folder, or find it, and wait for its end. Being cancelled ends it."""
    following = Submission(stage, place, spec)
    try:
        async with progress_shown(spec):
            run = await following.until_ended()
    except asyncio.CancelledError:
        # The job is gone. Whoever starts the run again wants another one, not this one's end.
        if not following.is_left:
            try:
                settle(place, spec, Kind.STOPPED)
            except OSError as error:  # such as a full disk: stopped it is all the same
                get_run_logger().warning("%s: its end could not be noted: %s", spec.name, error)
        raise
    outcome = await run.fetch_result()
    with run_folder_io(Path(spec.run_directory)):
        settle(place, spec, outcome.kind, outcome.message, outcome.failed_shares)
    return outcome


def settle(
    place: StageEnvironment,
    spec: LaunchSpec,
    kind: Kind,
    message: str = "",
    shares: tuple[int, ...] = (),
) -> None:
    """Note how the job of a scheduler ended: it is not followed any more."""
    if place.block in SCHEDULED:
        told = {"kind": kind, "message": message, "shares": shares}
        write_record(Path(spec.run_directory, SETTLED), told)


class Submission:
    """A job that is followed, and what was said of its place being away."""

    def __init__(self, stage: str, place: StageEnvironment, spec: LaunchSpec) -> None:
        self._stage, self._place, self._spec = stage, place, spec
        self._log = get_run_logger()
        self._looks = 0
        """In a row, that found nobody."""
        self._since = 0.0
        self._told_at = -math.inf
        self.is_left = False
        """It was cancelled, and its place could not be told: the job may go on."""

    async def until_ended(self) -> StageJobRun:
        """The run of the job, which has ended."""
        while True:
            try:
                return await self._once()
            except BackendUnavailableError as error:
                if _is_cancelled():
                    self._leave(error)
                    raise asyncio.CancelledError from error
                if self._noted() is None:
                    raise
                words = str(error)
            await self._wait(words)

    async def _once(self) -> StageJobRun:
        run = await self._found()
        try:
            if not self._looks:
                await show_submitted(self._spec)
            async with self._return_told(run):
                await run.wait_for_completion()
        except asyncio.CancelledError:
            await run.stop()  # it may be that nobody waited for it yet
            raise
        return run

    async def _found(self) -> StageJobRun:
        return await BLOCKS[self._place.block](self._place, self._spec, self._stage).trigger()

    # --- its place is away --------------------------------------------------------------------

    async def _wait(self, words: str) -> None:
        """Until the next look; being cancelled meanwhile ends the job, if that can be done now."""
        self._looks += 1
        if self._looks == 1:
            self._since, self._told_at = time.time(), -math.inf
        try:
            await self._tell_away(words)
            await asyncio.sleep(with_jitter(pause_seconds(self._looks)))
        except asyncio.CancelledError:
            await self._end_unseen()
            raise

    async def _tell_away(self, words: str) -> None:
        if time.monotonic() - self._told_at < AGAIN_SECONDS:
            return
        self._told_at = time.monotonic()
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self._since))
        note = f"its job cannot be seen since {since}, and may go on: {words}; looked for again"
        self._headline("waits", f"{note} until it can, or this is cancelled", logging.WARNING)
        state = f"its job cannot be seen since {since}, and may go on: looked for again"
        await show_waiting(self._stage, self._spec, f"waits: {state}", words)

    @contextlib.asynccontextmanager
    async def _return_told(self, run: StageJobRun) -> AsyncIterator[None]:
        """Say it as soon as the place of a job that could not be seen answers again."""
        if not self._looks:
            yield
            return
        telling = asyncio.create_task(self._tell_return(run))
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    async def _tell_return(self, run: StageJobRun) -> None:
        while not run.was_answered:
            await asyncio.sleep(LOOK_SECONDS)
        self._looks = 0
        state = f"its job is seen again, after {time.time() - self._since:.0f} s"
        self._headline("runs", state)
        await show_waiting(self._stage, self._spec, f"runs: {state}")

    def _headline(self, state: str, note: str, level: int = logging.INFO) -> None:
        headline(self._log, self._spec.name, state, note=note, level=level)

    # --- cancelled ----------------------------------------------------------------------------

    async def _end_unseen(self) -> None:
        """Of a flow that is cancelled while nobody answers for its job."""
        self.is_left = True
        self._note_cancelled()  # this program may be killed before anybody answers
        self._log.warning("%s: cancelled while its job cannot be seen: trying once", self._name)
        try:
            run = await self._found()
            await run.stop()
        except TrainyardError as error:
            self._leave(error)
        else:
            self.is_left = False

    def _leave(self, error: TrainyardError) -> None:
        self.is_left = True
        self._note_cancelled()
        self._log.error(
            "%s: cancelled, and its job could not be ended: %s. It may go on%s; Retry would end "
            "it and begin another",
            self._name,
            error,
            self._by_hand(),
        )

    def _note_cancelled(self) -> None:
        """For a program that starts this run again: it ends the job before it submits another."""
        folder = Path(self._spec.run_directory)
        try:
            if read_ending(folder) is None:
                write_ending(folder, Ending(kind=Kind.STOPPED, was_signalled=False))
        except OSError as error:
            self._log.warning("%s: its ending could not be noted: %s", self._name, error)

    # --- what is known of it --------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self._spec.name

    def _noted(self) -> dict[str, Any] | None:
        """What its block noted when it had submitted it; None: it has not, as far as is known."""
        if self._place.block not in ENDED_BY_HAND:
            return None
        file, _ = ENDED_BY_HAND[self._place.block]
        folder = Path(self._spec.run_directory)
        with run_folder_io(folder):
            return read_record(folder / file)

    def _by_hand(self) -> str:
        job = self._noted()
        if job is None:
            return ""
        _, command = ENDED_BY_HAND[self._place.block]
        return f": end it there ({command.format_map(job)})"


def _is_cancelled() -> bool:
    """True while this task is told to end: what it waited for may have failed at that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
