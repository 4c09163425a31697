"""What the runs of all blocks have in common: waited for; told to stop once, and that seen through,
if need be by the program that follows after this one; a job that is silent for too long ended; its
lines passed on; its end noted."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from prefect.blocks.abstract import JobRun

from flows.backends.errors import BackendUnavailableError
from flows.backends.events import note
from flows.backends.live_jobs import wait_uncancelled
from flows.backends.notes import Ending, read_ending, run_folder_io, write_ending
from flows.backends.outcome import Kind, Outcome
from flows.backends.spec import LaunchSpec
from flows.logs.console import JOB, Log
from flows.logs.lines import parse_line
from trainyard.errors import TrainyardError


class StageJobRun(JobRun[Outcome]):
    """A job that was found or started, until its end is known.

    Who makes one adds it to `live` when all of it is there."""

    def __init__(self, spec: LaunchSpec, job: str, log: Log | None = None) -> None:
        """job: what its place knows it by; log: where its lines go, else to the run's logger."""
        self.spec = spec
        self._job = job
        self._folder = Path(spec.run_directory)
        self._log: Log = self.logger if log is None else log
        # Of a program before this one, which was killed meanwhile.
        self._begun_ending = read_ending(self._folder)
        begun = self._begun_ending
        self._ended_by_us: Kind | None = None if begun is None else begun.kind
        self._stopping: asyncio.Task[None] | None = None
        self.was_answered = False
        """Its place has told how it is, since this run was made."""

    # --- of each block ------------------------------------------------------------------------

    @abstractmethod
    async def _until_ended(self) -> None:
        """Wait until nothing of it runs any more."""

    @abstractmethod
    async def _hear_the_end(self) -> None:
        """Take in what is left to be heard of one that has ended, and clean up; maybe twice."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """True when nothing of it runs any more, as far as is known here."""

    @abstractmethod
    async def _stop(self) -> None:
        """Let it save within its grace, then end it; until its place confirms the end."""

    @abstractmethod
    def _outcome(self) -> Outcome:
        """How it ended, once it has."""

    def _ended_at(self) -> float | None:
        """When it gave back what it held, where its place tells; None: now."""
        return None

    # --- waiting ------------------------------------------------------------------------------

    async def wait_for_completion(self) -> None:  # type: ignore[override]  # a Logger, says the base
        """Until the job has ended. Being cancelled stops it; any other end of the waiting, such as
        a scheduler or a file system that stays away (InfrastructureError), leaves it to be followed
        again. One that a program before this one was ending is ended."""
        with run_folder_io(self._folder):
            if self._begun_ending is not None:
                self.begin_stopping()
            try:
                await self._until_ended()
            except asyncio.CancelledError:
                await self.stop()
                raise
            if self._stopping is not None:
                await self.stop()
            await self._hear_the_end()

    # --- listening ----------------------------------------------------------------------------

    def _say(self, line: str, label: str = "") -> None:
        """Pass a line of its output on, at the level that the stage gave it."""
        level, text = parse_line(line)
        self._log.log(level, "%s", label + text, extra={JOB: self.spec.name})

    # --- stopping -----------------------------------------------------------------------------

    @property
    def is_being_stopped(self) -> bool:
        """True once it was told to stop, or has ended."""
        return self._stopping is not None or self._has_ended()

    @property
    def is_over(self) -> bool:
        """True once it has ended, or stopping it has, as far as this process knows."""
        return self._has_ended() or (self._stopping is not None and self._stopping.done())

    def begin_stopping(self) -> asyncio.Task[None]:
        """Tell it to stop, unless it was told; the task ends when it has."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        return self._stopping

    async def stop(self) -> None:
        """Tell it to stop, and wait until it has, however often this is cancelled meanwhile."""
        await wait_uncancelled(self.begin_stopping())

    def _end(self, kind: Kind) -> None:
        """Tell it to stop for a reason of ours, which is then how it ended."""
        self._ended_by_us = kind
        self.begin_stopping()

    @property
    def _was_told(self) -> bool:
        """True when a program before this one has told it to save and leave."""
        return self._begun_ending is not None and self._begun_ending.is_told

    def _note_ending(self, *, is_told: bool = False) -> None:
        """Note why it is being ended, in case that this program is killed meanwhile; by a person
        unless `_end` said otherwise. is_told: it has just been told to save and leave."""
        self._ended_by_us = self._ended_by_us or Kind.STOPPED
        ending = Ending(kind=self._ended_by_us, is_told=is_told or self._was_told)
        try:
            write_ending(self._folder, ending)
        except OSError as error:  # such as a full disk: it is ended all the same
            self._log.warning("%s: its ending could not be noted: %s", self.spec.name, error)

    def _end_if_silent(self, silent_seconds: float, limit: float | None) -> None:
        if limit is not None and silent_seconds > limit:
            name = self.spec.name
            self._log.error("%s has said nothing for %.0f s: ending it", name, silent_seconds)
            self._end(Kind.HANG)

    def _check_stopping(self) -> None:
        """Raise why a job that was told to stop could not be: nobody would tell it again."""
        if self._stopping is not None and self._stopping.done():
            self._stopping.result()

    # --- the end ------------------------------------------------------------------------------

    async def fetch_result(self) -> Outcome:
        """How it ended; ValueError while it runs."""
        if not self._has_ended():
            raise ValueError(
                f"{self.spec.name} is still running: call wait_for_completion before fetch_result"
            )
        with run_folder_io(self._folder):
            outcome = self._outcome()
            self._note_end(outcome.kind)
        return outcome

    def _note_end(self, kind: Kind) -> None:
        try:
            note(self._folder, "ended", at=self._ended_at(), job=self._job, kind=str(kind))
        except OSError as error:  # such as a full disk: it has ended all the same
            self._log.warning("%s: its end could not be noted: %s", self.spec.name, error)


AnyRun = TypeVar("AnyRun", bound=StageJobRun)


async def when_found(spec: LaunchSpec, finding: Coroutine[Any, Any, AnyRun]) -> AnyRun:
    """The run that a block finds or starts. One that is cancelled meanwhile stops the job, once it
    is there: nobody else would know of it."""
    found = asyncio.create_task(_found(Path(spec.run_directory), finding))
    try:
        return await asyncio.shield(found)
    except asyncio.CancelledError:
        await wait_uncancelled(asyncio.create_task(_stop_found(found)))
        raise


async def _found(folder: Path, finding: Coroutine[Any, Any, AnyRun]) -> AnyRun:
    with run_folder_io(folder):
        return await finding


async def _stop_found(finding: asyncio.Task[AnyRun]) -> None:
    try:
        run = await finding
    except BackendUnavailableError:  # then there may be
        raise
    except TrainyardError:  # then there is nothing to stop
        return
    run.begin_stopping()
    await run.wait_for_completion()
