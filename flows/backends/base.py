"""Follows one job in any backend: waiting, output, hang detection, stopping, outcome.

A job *ends* by itself or because this program *stops* it. Stopping begins once and is always
finished, if need be by the next program that follows the job. The package's docstring defines the
terms."""

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
from flows.backends.run_folder import StopRecord, read_stop_record, run_folder_io, write_stop_record
from flows.backends.spec import LaunchSpec
from flows.logs.console import JOB, Log
from flows.logs.lines import parse_line
from trainyard.errors import TrainyardError


class StageJobRun(JobRun[Outcome]):
    """Follows a job that was found or started, until its outcome is known.

    A subclass adds itself to `live` at the end of its __init__."""

    def __init__(self, spec: LaunchSpec, job: str, log: Log | None = None) -> None:
        """job: its name or id in the backend; log: where its lines go, else the run's logger."""
        self.spec = spec
        self._job = job
        self._folder = Path(spec.run_directory)
        self._log: Log = self.logger if log is None else log
        # Of an earlier program that was killed while it stopped the job.
        self._earlier_stop = begun = read_stop_record(self._folder)
        self._stop_reason: Kind | None = None if begun is None else begun.kind
        """Why we stop the job; None: we do not."""
        self._stopping: asyncio.Task[None] | None = None

    # --- of each backend ----------------------------------------------------------------------

    @abstractmethod
    async def _wait_until_ended(self) -> None:
        """Wait until no process of the job runs."""

    @abstractmethod
    async def _drain(self) -> None:
        """Read the last output of an ended job, and clean up; may be called twice."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether no process of the job runs, as far as this program knows."""

    @abstractmethod
    async def _stop_job(self) -> None:
        """Stop the job: let it save within its grace, then kill it. Returns once the backend
        confirms the end."""

    @abstractmethod
    def _outcome(self) -> Outcome:
        """How an ended job ended."""

    def _end_time(self) -> float | None:
        """When the job released its resources, if the backend reports that; None: now."""
        return None

    # --- waiting ------------------------------------------------------------------------------

    async def wait_for_completion(self) -> None:  # type: ignore[override]  # a Logger, says the base
        """Wait until the job has ended. Cancelling this call stops the job; any other error, such
        as an unavailable scheduler (InfrastructureError), leaves it running, to be followed again.
        If an earlier program began to stop the job, this finishes that."""
        with run_folder_io(self._folder):
            if self._earlier_stop is not None:
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
        """Log a line of the job's output at the level that the stage gave it."""
        level, text = parse_line(line)
        self._log.log(level, "%s", label + text, extra={JOB: self.spec.name})

    # --- stopping -----------------------------------------------------------------------------

    @property
    def is_stopping_or_ended(self) -> bool:
        """Whether we began to stop the job, or it has ended."""
        return self._stopping is not None or self._has_ended()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for: the job has ended, or our attempt to stop it has."""
        return self._has_ended() or (self._stopping is not None and self._stopping.done())

    def begin_stopping(self, reason: Kind | None = None) -> asyncio.Task[None]:
        """Begin to stop the job, once; the task ends when it has stopped.

        reason: becomes the outcome; None: that of an earlier program, or STOPPED."""
        if reason is not None:
            self._stop_reason = reason
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_job())
            # Whoever waits raises its error; a wait that failed before that leaves none to do so.
            self._stopping.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._stopping

    async def stop(self) -> None:
        """Stop the job and wait until it has stopped, however often this call is cancelled."""
        await wait_uncancelled(self.begin_stopping())

    @property
    def _was_signalled(self) -> bool:
        """Whether an earlier program sent the job the signal to save and exit."""
        return self._earlier_stop is not None and self._earlier_stop.was_signalled

    def _record_stop(self, *, was_signalled: bool = False) -> None:
        """Record why we stop the job, so that another program can finish if this one is killed.

        was_signalled: the signal to save and exit was just sent."""
        self._stop_reason = self._stop_reason or Kind.STOPPED
        signalled = was_signalled or self._was_signalled
        try:
            stop = StopRecord(kind=self._stop_reason, was_signalled=signalled)
            write_stop_record(self._folder, stop)
        except OSError as error:  # such as a full disk: stop the job all the same
            self._log.warning("%s: could not record that it stops: %s", self.spec.name, error)

    def _stop_if_silent(self, silent_seconds: float, limit: float | None) -> None:
        if limit is not None and silent_seconds > limit:
            name = self.spec.name
            self._log.error("%s: no output for %.0f s; stopping it", name, silent_seconds)
            self.begin_stopping(Kind.HANG)

    def _raise_stop_failure(self) -> None:
        """Raise the error with which stopping failed, since it does not begin again."""
        if self._stopping is not None and self._stopping.done():
            self._stopping.result()

    # --- the end ------------------------------------------------------------------------------

    async def fetch_result(self) -> Outcome:
        """How the job ended; ValueError while it runs."""
        if not self._has_ended():
            raise ValueError(
                f"{self.spec.name} is still running: call wait_for_completion before fetch_result"
            )
        with run_folder_io(self._folder):
            outcome = self._outcome()
            self._record_ended(outcome.kind)
        return outcome

    def _record_ended(self, kind: Kind) -> None:
        self._try_record_event("ended", at=self._end_time(), kind=str(kind))

    def _try_record_event(self, event: Name, **facts: Any) -> None:
        """Record an event of the job; if that fails, log a warning."""
        try:
            record_event(self._folder, event, job=self._job, **facts)
        except OSError as error:  # such as a full disk
            self._log.warning("%s: could not record event %s: %s", self.spec.name, event, error)


AnyRun = TypeVar("AnyRun", bound=StageJobRun)


async def find_or_start(spec: LaunchSpec, finding: Coroutine[Any, Any, AnyRun]) -> AnyRun:
    """The job that a backend finds or starts. If this call is cancelled, the job is stopped as soon
    as it exists, since nothing else knows of it."""

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
