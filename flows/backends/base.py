"""The run of a job, in whichever backend: waiting, output, hang detection, stopping, its end.

Stopping is begun once and carried to its end, if need be by the program that follows this one."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from prefect.blocks.abstract import JobRun

from flows.backends.errors import BackendUnavailableError
from flows.backends.events import Name, record_event
from flows.backends.live_jobs import wait_uncancelled
from flows.backends.outcome import Kind, Outcome
from flows.backends.run_folder import Ending, read_ending, run_folder_io, write_ending
from flows.backends.spec import LaunchSpec
from flows.logs.console import JOB, Log
from flows.logs.lines import parse_line
from trainyard.errors import TrainyardError


class StageJobRun(JobRun[Outcome]):
    """A job that was found or started, until its end is known.

    A subclass adds itself to `live` at the end of its __init__."""

    def __init__(self, spec: LaunchSpec, job: str, log: Log | None = None) -> None:
        """job: its name or id in the backend; log: where its lines go, else the run's logger."""
        self.spec = spec
        self._job = job
        self._folder = Path(spec.run_directory)
        self._log: Log = self.logger if log is None else log
        # Of a program before this one that was killed.
        self._begun_ending = begun = read_ending(self._folder)
        self._ended_by_us: Kind | None = None if begun is None else begun.kind
        self._stopping: asyncio.Task[None] | None = None
        self.was_answered = False
        """The backend has reported its state to this run."""

    # --- of each backend ----------------------------------------------------------------------

    @abstractmethod
    async def _wait_until_ended(self) -> None:
        """Wait until nothing of it runs any more."""

    @abstractmethod
    async def _drain(self) -> None:
        """Take in the last output of an ended job, and clean up; may be called twice."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """True once nothing of it runs any more, as far as this process knows."""

    @abstractmethod
    async def _stop(self) -> None:
        """Let it save within its grace, then end it; until the backend confirms the end."""

    @abstractmethod
    def _outcome(self) -> Outcome:
        """How it ended, once it has."""

    def _end_time(self) -> float | None:
        """When it released its resources, if the backend reports that; None: now."""
        return None

    # --- waiting ------------------------------------------------------------------------------

    async def wait_for_completion(self) -> None:  # type: ignore[override]  # a Logger, says the base
        """Wait until the job has ended. Being cancelled stops it. Any other error, such as an
        unavailable scheduler (InfrastructureError), leaves it running, to be followed again. An
        ending that a program before this one had begun is finished."""
        with run_folder_io(self._folder):
            if self._begun_ending is not None:
                self.begin_stopping()
            try:
                await self._wait_until_ended()
            except asyncio.CancelledError:
                await self.stop()
                raise
            if self._stopping is not None:
                await self.stop()
            await self._drain()

    def _relay(self, line: str, label: str = "") -> None:
        """Log a line of its output at the level that the stage gave it."""
        level, text = parse_line(line)
        self._log.log(level, "%s", label + text, extra={JOB: self.spec.name})

    # --- stopping -----------------------------------------------------------------------------

    @property
    def is_being_stopped(self) -> bool:
        """True once stopping has begun, or it has ended."""
        return self._stopping is not None or self._has_ended()

    @property
    def is_over(self) -> bool:
        """True once it has ended, or stopping it has, as far as this process knows."""
        return self._has_ended() or (self._stopping is not None and self._stopping.done())

    def begin_stopping(self) -> asyncio.Task[None]:
        """Begin to stop it, once; the task ends when it has stopped."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        return self._stopping

    async def stop(self) -> None:
        """Stop it and wait until it has, however often this is cancelled."""
        await wait_uncancelled(self.begin_stopping())

    def _end(self, kind: Kind) -> None:
        """Begin to stop it for a reason of ours, which becomes its outcome."""
        self._ended_by_us = kind
        self.begin_stopping()

    @property
    def _was_signalled(self) -> bool:
        """True if a program before this one has sent it the signal to save and exit."""
        return self._begun_ending is not None and self._begun_ending.was_signalled

    def _record_ending(self, *, was_signalled: bool = False) -> None:
        """Record why it is being ended, in case this program is killed; STOPPED unless `_end` gave
        another reason. was_signalled: the signal to save and exit was just sent."""
        self._ended_by_us = self._ended_by_us or Kind.STOPPED
        signalled = was_signalled or self._was_signalled
        try:
            ending = Ending(kind=self._ended_by_us, was_signalled=signalled)
            write_ending(self._folder, ending)
        except OSError as error:  # such as a full disk: it is ended all the same
            self._log.warning("%s: could not record its ending: %s", self.spec.name, error)

    def _end_if_silent(self, silent_seconds: float, limit: float | None) -> None:
        if limit is not None and silent_seconds > limit:
            name = self.spec.name
            self._log.error("%s: no output for %.0f s; ending it", name, silent_seconds)
            self._end(Kind.HANG)

    def _check_stopping(self) -> None:
        """Raise the error with which stopping failed: it is not begun again."""
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
            self._record_end(outcome.kind)
        return outcome

    def _record_end(self, kind: Kind) -> None:
        self._try_record_event("ended", at=self._end_time(), kind=str(kind))

    def _try_record_event(self, event: Name, **facts: Any) -> None:
        """Record an event of the job; one that cannot be recorded changes nothing else."""
        try:
            record_event(self._folder, event, job=self._job, **facts)
        except OSError as error:  # such as a full disk
            self._log.warning("%s: could not record event %s: %s", self.spec.name, event, error)


AnyRun = TypeVar("AnyRun", bound=StageJobRun)


async def find_or_start(spec: LaunchSpec, finding: Coroutine[Any, Any, AnyRun]) -> AnyRun:
    """The run that a backend finds or starts. If this is cancelled, the job is stopped as soon as
    it exists: nothing else knows of it."""

    async def find() -> AnyRun:
        with run_folder_io(Path(spec.run_directory)):
            return await finding

    found = asyncio.create_task(find())
    try:
        return await asyncio.shield(found)
    except asyncio.CancelledError:
        await wait_uncancelled(asyncio.create_task(_stop_found(found)))
        raise


async def _stop_found(finding: asyncio.Task[AnyRun]) -> None:
    try:
        run = await finding
    except BackendUnavailableError:  # there may be a job
        raise
    except TrainyardError:  # there is none
        return
    run.begin_stopping()
    await run.wait_for_completion()
