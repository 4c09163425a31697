"""Follows one submission of a stage until its end is recorded in its run folder.

A backend may be unavailable for longer than its client retries, such as during a weekend of
maintenance. The stage has not failed then, and its job may run on. So the submission polls for the
job as long as it takes, within one attempt. A backend that is unavailable before a job was
submitted may not exist at all, so that fails the attempt (flows/runner/stage_task.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from flows.backends import contact
from flows.backends.base import StageJobRun
from flows.backends.container.client import RECORD
from flows.backends.errors import BackendUnavailableError
from flows.backends.outcome import Kind, Outcome
from flows.backends.run_folder import (
    SUBMITTED,
    StopRecord,
    read_record,
    read_stop_record,
    run_folder_io,
    write_record,
    write_stop_record,
)
from flows.backends.spec import LaunchSpec
from flows.logs.console import headline
from flows.pages.progress import progress_shown
from flows.pages.stage_pages import show_submitted, show_waiting
from flows.runner.job_blocks import JOB_BLOCKS
from flows.runner.retry import pause_seconds, with_jitter
from flows.runner.wait_state import wait_state
from flows.yard.profile import SCHEDULED, StageEnvironment
from trainyard.errors import TrainyardError

SETTLED = "settled.json"
"""File in the run folder of a scheduler's job whose end is known; a retry submits another job."""

STOP_COMMANDS = {
    "container": (RECORD, "docker rm --force {name}"),
    "slurm": (SUBMITTED, "scancel {job_id}"),
    "kubernetes": (SUBMITTED, "kubectl --namespace {namespace} delete {kind} {name}"),
}
"""The file in which a backend records its job, and the command by which a person stops that job."""

BACKENDS = {
    "container": "the Docker engine",
    "slurm": "Slurm's controller",
    "kubernetes": "the API server of Kubernetes",
}
SILENT_SECONDS = 5.0
"""How long a request may have no answer until the log says so."""
AGAIN_SECONDS = 60.0
"""Between two log lines of a stage whose backend is still unavailable."""
LOOK_SECONDS = 1.0
"""Between two checks whether the backend answers."""


async def follow(stage: str, site: StageEnvironment, spec: LaunchSpec) -> Outcome:
    """Start the job of a run folder, or find it, and wait for its end. Cancelling stops the job."""
    submission = Submission(stage, site, spec)
    try:
        async with progress_shown(spec):
            run = await submission.wait()
    except asyncio.CancelledError:
        # The job is stopped. A run that starts again submits another one.
        if not submission.may_run_on:
            try:
                settle(site, spec, Kind.STOPPED)
            except OSError as error:  # such as a full disk; the job is stopped all the same
                get_run_logger().warning("%s: its end was not recorded: %s", spec.name, error)
        raise
    outcome = await run.fetch_result()
    with run_folder_io(Path(spec.run_directory)):
        settle(site, spec, outcome.kind, outcome.message, outcome.failed_shares)
    return outcome


def settle(
    site: StageEnvironment,
    spec: LaunchSpec,
    kind: Kind,
    message: str = "",
    shares: tuple[int, ...] = (),
) -> None:
    """Record how the job of a scheduler ended, so that it is no longer followed."""
    if site.backend in SCHEDULED:
        document = {"kind": kind, "message": message, "shares": shares}
        write_record(Path(spec.run_directory, SETTLED), document)


class Submission:
    """Follows a job, also while its backend is unavailable."""

    def __init__(self, stage: str, site: StageEnvironment, spec: LaunchSpec) -> None:
        self._stage, self._site, self._spec = stage, site, spec
        self._log = get_run_logger()
        self._looks = 0
        """Polls in a row that found the backend unavailable."""
        self._contact = contact.observe()
        self._since = 0.0
        """When the silence that was reported began, by time.time(); 0: none was."""
        self._logged_at = -math.inf
        self.may_run_on = False
        """Whether this was cancelled and the job could not be stopped."""

    async def wait(self) -> StageJobRun:
        """Wait until the job has ended. Meanwhile the log says while the backend is silent."""
        watching = asyncio.create_task(self._watch_contact())
        try:
            return await self._wait()
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _wait(self) -> StageJobRun:
        while True:
            try:
                return await self._once()
            except BackendUnavailableError as error:
                if _is_cancelled():
                    self._report_running_on(error)
                    raise asyncio.CancelledError from error
                if self._recorded_job() is None:
                    raise
                reason = str(error)
            await self._wait_for_backend(reason)

    async def _once(self) -> StageJobRun:
        run = await self._trigger()
        try:
            if not self._looks:
                await show_submitted(self._spec)
            await run.wait_for_completion()
        except asyncio.CancelledError:
            await run.stop()  # the cancellation may have come before wait_for_completion
            raise
        return run

    async def _trigger(self) -> StageJobRun:
        return await JOB_BLOCKS[self._site.backend](self._site, self._spec, self._stage).trigger()

    # --- the backend is unavailable -----------------------------------------------------------

    async def _wait_for_backend(self, reason: str) -> None:
        """Pause until the next poll. Cancelling this stops the job if the backend answers now."""
        self._looks += 1
        try:
            await self._report_unavailable(reason)
            await asyncio.sleep(with_jitter(pause_seconds(self._looks)))
        except asyncio.CancelledError:
            await self._try_to_stop()
            raise

    async def _watch_contact(self) -> None:
        """Report that the backend is silent, until this is cancelled, and when it answers again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            silent_seconds = self._contact.silent_seconds
            with contextlib.suppress(TrainyardError):  # the run folder may be away as well
                if silent_seconds > SILENT_SECONDS:
                    await self._report_unavailable(self._contact.reason or "no answer yet")
                elif self._since and not silent_seconds:
                    await self._report_return()

    async def _report_unavailable(self, reason: str) -> None:
        is_first = not self._since
        if is_first:
            self._since, self._logged_at = time.time() - self._contact.silent_seconds, -math.inf
        if time.monotonic() - self._logged_at < AGAIN_SECONDS:
            return
        self._logged_at = time.monotonic()
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self._since))
        state = f"{self._backend} has not answered since {since}"
        if self._recorded_job() is not None:
            state = f"{state}: its job cannot be seen, and may still run"
        self._headline("waits", f"{state}; asking again ({reason})", logging.WARNING)
        wait_state().wait(self._spec.name, f"Waits for {self._site.backend}", f"{state} ({reason})")
        if is_first:
            await show_waiting(self._stage, self._spec, f"waits: {state}; asking again", reason)

    async def _report_return(self) -> None:
        wait_state().end_wait(self._spec.name)
        seconds, self._since, self._looks = time.time() - self._since, 0.0, 0
        state = f"{self._backend} answers again, after {seconds:.0f} s"
        self._headline("runs", state)
        await show_waiting(self._stage, self._spec, f"runs: {state}")

    @property
    def _backend(self) -> str:
        return BACKENDS.get(self._site.backend, self._site.backend)

    def _headline(self, state: str, note: str, level: int = logging.INFO) -> None:
        headline(self._log, self._spec.name, state, note=note, level=level)

    # --- cancelled ----------------------------------------------------------------------------

    async def _try_to_stop(self) -> None:
        """Try once to stop a job whose backend is unavailable."""
        self.may_run_on = True
        self._record_cancelled()  # this program may be killed before the backend answers
        self._log.warning(
            "%s: cancelled while its job cannot be seen: trying once to stop it", self._spec.name
        )
        try:
            run = await self._trigger()
            await run.stop()
        except TrainyardError as error:
            self._report_running_on(error)
        else:
            self.may_run_on = False

    def _report_running_on(self, error: TrainyardError) -> None:
        self.may_run_on = True
        self._record_cancelled()
        job = self._recorded_job()
        by_hand = ""
        if job is not None:
            _, command = STOP_COMMANDS[self._site.backend]
            by_hand = f": end it there ({command.format_map(job)})"
        self._log.error(
            "%s: cancelled, and its job could not be stopped: %s. It may still be running%s; Retry "
            "stops it "
            "and submits another",
            self._spec.name,
            error,
            by_hand,
        )

    def _record_cancelled(self) -> None:
        """Record the cancellation: a restarted flow then stops this job before it submits one."""
        folder = Path(self._spec.run_directory)
        try:
            if read_stop_record(folder) is None:
                write_stop_record(folder, StopRecord(kind=Kind.STOPPED, was_signalled=False))
        except OSError as error:
            self._log.warning("%s: its end was not recorded: %s", self._spec.name, error)

    def _recorded_job(self) -> dict[str, Any] | None:
        """The job as the backend recorded it on submission; None if no job is known."""
        if self._site.backend not in STOP_COMMANDS:
            return None
        file, _ = STOP_COMMANDS[self._site.backend]
        folder = Path(self._spec.run_directory)
        with run_folder_io(folder):
            return read_record(folder / file)


def _is_cancelled() -> bool:
    """Whether this task is being cancelled, which may be why an awaited call failed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
