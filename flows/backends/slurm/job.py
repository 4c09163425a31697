"""Runs a stage as a job of Slurm: submits it once, finds it again, follows it to its end.

The job outlives the program that submitted it. Its name holds the key of the submission, so a flow
that was killed and started again follows the existing job instead of submitting another."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefect.blocks.abstract import JobBlock

from flows.backends.backoff import SubmitBackoff
from flows.backends.base import StageJobRun, find_or_start
from flows.backends.events import record_event
from flows.backends.live_jobs import live
from flows.backends.liveness import Liveness
from flows.backends.outcome import (
    JobEnd,
    Kind,
    Outcome,
    classify_exit,
    join_shares,
    of_kind,
    read_failure,
    read_tail,
)
from flows.backends.run_folder import (
    HEARTBEAT,
    SUBMITTED,
    log_name,
    make_run_folder,
    read_record,
    share_folder,
    write_record,
)
from flows.backends.slurm.client import SlurmClient, other_clusters
from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.records import HELD, JobRecord
from flows.backends.slurm.script import EXIT, SCRIPT, job_name, render_slurm
from flows.backends.slurm.tracker import JobTracker, PollSchedule
from flows.backends.spec import LaunchSpec
from flows.logs.lines import Followed
from trainyard import json_text
from trainyard.errors import ConfigError, InfrastructureError

TICK_SECONDS = 0.5
FORGOTTEN_SECONDS = 60.0
"""How long a job may be missing from Slurm's lists until it counts as gone; accounting lags."""
LATE_SECONDS = 5.0
"""How long to wait for the last lines and the exit file, over a network file system."""
MOST_GRACE_SECONDS = 18.0
"""Longest grace of a cancelled job. Prefect's worker kills a flow 30 s after asking it to stop. By
then Slurm must confirm the end, and the worker, which polls every 3 s, must see it."""
ROOM_PAUSE_SECONDS = 60.0
"""Between two tries to submit while the queue is full."""
KILL_STEPS_SECONDS = 4.0
"""How long SIGKILL is repeated before scancel."""
KILL_SECONDS = 180.0
"""How long a cancelled job may still exist, for KillWait and epilogues."""

OUT_OF_MEMORY = re.compile(r"^srun: error: .*: tasks? \S+: Out Of Memory$", re.MULTILINE)
"""srun's line for a step that a cgroup killed; the job itself is FAILED, with status 1."""


class SlurmJob(JobBlock[Outcome]):
    """Runs a stage through sbatch, or follows the job that already runs it."""

    _block_type_name = "Slurm Job"
    _block_type_slug = "slurm-job"
    _description = "Runs a stage's own command as a job of Slurm."

    spec: LaunchSpec
    options: SlurmOptions = SlurmOptions()
    poll_seconds: float = 10.0
    """Between two polls of the controller; an exit file causes one at once."""
    hang_seconds: float | None = None
    """A running job counts as hung after this long without a line in its log."""

    def client(self) -> SlurmClient:
        """The client for Slurm."""
        return SlurmClient()

    async def trigger(self) -> SlurmJobRun:
        """Find the job of this key, or submit it as soon as the queue has room. Cancelling this
        stops the job."""
        backoff = SubmitBackoff(self.spec.name, self.options.room_seconds, self.logger)
        return await backoff.submit(
            lambda: find_or_start(self.spec, asyncio.to_thread(self._find_or_submit)),
            ROOM_PAUSE_SECONDS,
        )

    def _find_or_submit(self) -> SlurmJobRun:
        if elsewhere := other_clusters(os.environ):
            raise ConfigError(elsewhere)
        script = render_slurm(self.spec, self.options)
        folder, name, client = Path(self.spec.run_directory), job_name(self.spec), self.client()
        record = read_record(folder / SUBMITTED, name)
        job_id = client.find(name) if record is None else str(record["job_id"])
        if job_id is None:
            make_run_folder(folder)
            (folder / SCRIPT).write_text(script)
            job_id = client.submit(folder / SCRIPT, name)
            record_event(folder, "submitted", job=job_id)
            self.logger.info("submitted %s as Slurm job %s", self.spec.name, job_id)
        else:
            record_event(folder, "reattached", job=job_id)
            self.logger.info("%s is already Slurm job %s; following it", self.spec.name, job_id)
        write_record(folder / SUBMITTED, {"name": name, "job_id": job_id})
        return SlurmJobRun(self, client, job_id)


class SlurmJobRun(StageJobRun):
    """Follows a job of Slurm; its log goes to the run's logger."""

    def __init__(self, block: SlurmJob, client: SlurmClient, job_id: str) -> None:
        super().__init__(block.spec, job_id)
        self.job_id = job_id
        self._block = block
        self._client = client
        shares = self.spec.shares
        self._indices: Sequence[int | None] = (None,) if shares is None else shares.indices
        self._followed = Followed(self._folder)
        self._liveness = Liveness(self._files())
        self._tracker = JobTracker(job_name(self.spec), self._indices, time.monotonic())
        self._state = ""
        self._never = ""
        """Why the job can never start; empty if it may."""
        self._never_since = 0.0
        self._ended = False
        # Waiting and stopping poll in threads, side by side: a cancellation ends no thread.
        self._asking, self._reading = threading.Lock(), threading.Lock()
        live.add(self)

    # --- waiting ------------------------------------------------------------------------------

    async def _wait_until_ended(self) -> None:
        poll_schedule = PollSchedule(self._block.poll_seconds, len(self._indices))
        while not self._ended:
            self._raise_stop_failure()
            await asyncio.to_thread(self._read_logs)
            if poll_schedule.is_due(len(self._exits()), time.monotonic()):
                await self._ask_and_read()
                if self._stopping is None:
                    self._check_start()
                    self._check_health()
            if not self._ended:
                await asyncio.sleep(min(TICK_SECONDS, self._block.poll_seconds))

    async def _ask_and_read(self) -> None:
        """Poll Slurm; the controller may be silent for minutes, in which the job writes on."""
        asking = asyncio.create_task(asyncio.to_thread(self._ask))
        try:
            while not (await asyncio.wait([asking], timeout=TICK_SECONDS))[0]:
                await asyncio.to_thread(self._read_logs)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        asking.result()

    def _ask(self) -> None:
        """Poll Slurm, and check whether the job has ended."""
        with self._asking:  # all of it, or an older answer might overtake a newer one
            found = self._client.records(self.job_id, self._tracker.unsettled)
            if self._tracker.add(found, time.monotonic()):
                self._log_state(self._tracker.records)
            exits = self._exits()
            self._ended = self._tracker.is_over(exits, FORGOTTEN_SECONDS, time.monotonic())

    def _log_state(self, records: Sequence[JobRecord]) -> None:
        """Log the state, and record queued or started; shares count as started with the first."""
        states = sorted({(r.state, r.reason if r.state == "PENDING" else "") for r in records})
        text = ", ".join(f"{state} ({why})" if why else state for state, why in states)
        if text != self._state:
            self._state = text
            self._log.info("Slurm job %s: %s", self.job_id, text)
            held = {HELD[why] for _, why in states if why in HELD}
            for why in held | {record.never_starts for record in records} - {None}:
                self._log.warning("Slurm job %s will not start: %s", self.job_id, why)
        began = [r.started for r in records if r.started is not None and r.state != "PENDING"]
        if began or any(record.state == "RUNNING" for record in records):
            record_event(self._folder, "started", at=min(began, default=None), job=self.job_id)
        else:
            record_event(self._folder, "queued", job=self.job_id)

    def _end_time(self) -> float | None:
        """From Slurm, else from the exit files."""
        ends = [r.ended for r in self._tracker.records if r.ended is not None and r.has_ended]
        ends = ends or [path.stat().st_mtime for path in self._exits().values()]
        return max(ends, default=None)

    def _check_start(self) -> None:
        """Stop a job that a broken node sent back and Slurm holds: another submission may run. Stop
        a job that can never start, after broken_seconds."""
        if any(record.was_not_started for record in self._tracker.records):
            self._log.error("Slurm job %s could not be started; stopping it", self.job_id)
            self.begin_stopping(Kind.NODE_FAILURE)
            return
        why = next(filter(None, (record.never_starts for record in self._tracker.records)), "")
        if not why or self._is_running():
            self._never = ""
            return
        if not self._never:
            self._never_since = time.monotonic()
        self._never = why
        limit = self._block.options.broken_seconds
        if time.monotonic() - self._never_since > limit:
            self._log.error("Slurm job %s did not start in %d s; stopping it", self.job_id, limit)
            self.begin_stopping(Kind.CONFIG)

    def _check_health(self) -> None:
        """Stop a running job that is silent for too long."""
        if not self._is_running():
            self._liveness.renew()
            return
        self._stop_if_silent(self._liveness.silent_seconds(), self._block.hang_seconds)

    def _files(self) -> Iterator[Path]:
        """Logs and heartbeats."""
        for index in self._indices:
            yield self._folder / log_name(index)
            yield self._folder / share_folder(index) / HEARTBEAT

    def _is_running(self) -> bool:
        return any(record.state == "RUNNING" for record in self._tracker.records)

    def _has_ended(self) -> bool:
        return self._ended

    def _exits(self) -> dict[int | None, Path]:
        """The exit files that exist."""
        files = ((index, self._folder / share_folder(index) / EXIT) for index in self._indices)
        return {index: path for index, path in files if path.exists()}

    # --- output -------------------------------------------------------------------------------

    def _read_logs(self) -> bool:
        """Relay new lines of the logs; False if there are none."""
        count = 0
        with self._reading:
            for index in self._indices:
                for line in self._followed.read(log_name(index)):
                    count += 1
                    self._relay(line, _label(index))
            if count:
                self._followed.remember()
        return count > 0

    async def _drain(self) -> None:
        """Wait for the exit files of a script that ran to its end, and for the last lines."""
        came_to_end = any(r.state in ("COMPLETED", "FAILED") for r in self._tracker.records)
        deadline = time.monotonic() + LATE_SECONDS
        while came_to_end and len(self._exits()) < len(self._indices):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(TICK_SECONDS)
        while await asyncio.to_thread(self._read_logs):
            await asyncio.sleep(TICK_SECONDS)
        for index in self._indices:
            for line in self._followed.finish(log_name(index)):
                self._relay(line, _label(index))

    # --- stopping -----------------------------------------------------------------------------

    async def _stop_job(self) -> None:
        """Send SIGUSR1, so that training saves; after the grace, SIGKILL and scancel. Wait until
        Slurm confirms the end. scancel alone takes KillWait (30 s) longer and would outlast this
        flow."""
        # Record first: the controller may be slow, and this flow may be killed meanwhile.
        self._record_stop()
        await asyncio.to_thread(self._ask)
        if self._has_ended():
            return
        # A script that has not come to srun has nothing to save, and would miss the signal.
        is_saving = self._is_running() and self._stop_reason is Kind.STOPPED
        if is_saving and await asyncio.to_thread(self._client.has_steps, self.job_id):
            if not self._was_signalled:
                # Not SIGTERM: it would reach each rank twice, once through torchrun.
                await asyncio.to_thread(self._client.signal_steps, self.job_id, "USR1")
                self._record_stop(was_signalled=True)
            grace = min(self.spec.grace_seconds, MOST_GRACE_SECONDS)
            self._log.info("Slurm job %s has %.0f s to save until SIGKILL", self.job_id, grace)
            await self._wait_until_gone(grace)
            await self._kill_steps()
        if not self._has_ended():
            await asyncio.to_thread(self._client.cancel, self.job_id)
            await self._wait_until_gone(KILL_SECONDS)
        if not self._has_ended():
            raise InfrastructureError(
                f"Slurm job {self.job_id} still exists {KILL_SECONDS:.0f} s after scancel; look at "
                f"its nodes (scontrol show job {self.job_id})"
            )
        self._record_ended(self._stop_reason or Kind.STOPPED)
        self._log.info("Slurm job %s was stopped", self.job_id)

    async def _kill_steps(self) -> None:
        """Send SIGKILL to what still runs, several times: a shell may start another program first,
        and after scancel Slurm kills nothing until KillWait is over."""
        deadline = time.monotonic() + KILL_STEPS_SECONDS
        while not self._has_ended() and time.monotonic() < deadline:
            running = [record for record in self._tracker.records if record.state == "RUNNING"]
            indices = [index for record in running for index in record.shares]
            await asyncio.to_thread(self._client.kill_steps, self.job_id, indices)
            await self._wait_until_gone(2 * TICK_SECONDS)

    async def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < deadline:
            await asyncio.sleep(min(2 * TICK_SECONDS, self._block.poll_seconds))
            await asyncio.to_thread(self._read_logs)
            await asyncio.to_thread(self._ask)

    # --- the end ------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        outcomes = {index: self._classify(index) for index in self._indices}
        return join_shares(self.spec.name, outcomes)

    def _classify(self, index: int | None) -> Outcome:
        if self._stop_reason is Kind.CONFIG:
            # If another program of ours stopped it, only that one knows why.
            why = self._never or "it waited for resources that it can never get"
            message = (
                f"job {self.job_id} could not have started: {why}; correct the Slurm options of "
                f"the yard or the job's resources"
            )
            return of_kind(self.spec.name, Kind.CONFIG, message)
        record = self._tracker.record(index)
        end = job_end(self.spec, index, self.job_id, record, self._stop_reason)
        return classify_exit(self.spec.name, end)


def _label(index: int | None) -> str:
    return "" if index is None else f"{index}: "


def job_end(
    spec: LaunchSpec,
    index: int | None,
    job_id: str,
    record: JobRecord | None,
    stop_reason: Kind | None,
) -> JobEnd:
    """All that is known of the end of a job, or of one of its shares.

    record: the newest one; None if Slurm has forgotten the job."""
    folder = Path(spec.run_directory, share_folder(index))
    log = Path(spec.run_directory, log_name(index))
    log_tail = read_tail(log)
    code = _exit_code(folder / EXIT, None if spec.shares else job_id)
    verdict = None if record is None else record.verdict
    message = f"job {job_id}: {record.summary if record else 'Slurm has forgotten it'}"
    if record is not None and record.had_no_log:
        # A requeued job may have left any report in its previous run.
        has_begun = not record.restarts and (code is not None or bool(log_tail))
        if not has_begun:
            verdict, message = Kind.NODE_FAILURE, f"{message}; {_no_log(record, log)}"
    if record is not None and record.state == "COMPLETED":
        code = 0
    if record is not None and record.state == "FAILED" and not code:
        code = record.exit_code or None  # a 0 in the file is from a previous run
    if verdict is None and code != 0 and OUT_OF_MEMORY.search(log_tail):
        verdict = Kind.OUT_OF_MEMORY
    return JobEnd(
        failure=read_failure(str(folder)),
        verdict=verdict,
        message=message,
        exit_code=code,
        is_of_launcher=spec.has_ranks,
        stop_reason=stop_reason,
        was_requeued=record is not None and record.restarts > 0,
        log_tail=log_tail,
    )


def _no_log(record: JobRecord, log: Path) -> str:
    node = record.nodes or "its node"
    return (
        f"Slurm reports that if it could not open the job's log, {log}: does {node} see that "
        f"folder, may the user write there, is its disk full, does Slurm's prolog fail? If only "
        f"this node does that, add it to the Slurm option exclude"
    )


def _exit_code(path: Path, job_id: str | None = None) -> int | None:
    """The exit code that the script recorded at its end; None without one.

    job_id: ignore the record of any other job, such as one that a person submitted."""
    try:
        document = json_text.loads(path.read_text())
        if job_id is not None and document.get("job_id", job_id) != job_id:
            return None
        return int(document["exit_status"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
