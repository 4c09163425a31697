"""A stage as a job of Slurm: submitted once, found again, followed to its end.

The job outlives whoever submitted it. The name of the job holds the key of the submission, so a
flow that was killed and started again follows the job that is there instead of submitting another.
What decides how it ended: flows/backends/ending.py."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefect.blocks.abstract import JobBlock

from flows.backends.backoff import SubmitBackoff
from flows.backends.base import StageJobRun, when_found
from flows.backends.ending import classify_exit, join_shares
from flows.backends.events import note
from flows.backends.live_jobs import live
from flows.backends.liveness import Liveness
from flows.backends.notes import SUBMITTED, read_note, write_note
from flows.backends.outcome import Kind, Outcome
from flows.backends.program import other_clusters
from flows.backends.run_folder import HEARTBEAT, log_name, share_folder
from flows.backends.slurm.client import SlurmClient
from flows.backends.slurm.evidence import gather, never_started
from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.poll_schedule import PollSchedule
from flows.backends.slurm.records import HELD, JobRecord
from flows.backends.slurm.script import EXIT, SCRIPT, job_name, render_slurm
from flows.backends.slurm.tracker import JobTracker
from flows.backends.spec import LaunchSpec
from flows.logs.lines import Followed
from trainyard.errors import ConfigError, InfrastructureError

TICK_SECONDS = 0.5
FORGOTTEN_SECONDS = 60.0
"""So long Slurm may know nothing of a job, as accounting lags, before it counts as gone."""
LATE_SECONDS = 5.0
"""So long the last lines and the exit file may take to be seen, over a network file system."""
MOST_GRACE_SECONDS = 18.0
"""Of the grace of a job that is cancelled. Prefect's worker kills a flow 30 s after it was told to
stop; until then Slurm has to confirm the end, and the worker, which looks every 3 s, to see it."""
ROOM_PAUSE_SECONDS = 60.0
"""Between two tries to submit, while the queue has no room."""
KILL_STEPS_SECONDS = 4.0
"""So long SIGKILL is repeated before scancel."""
KILL_SECONDS = 180.0
"""By then a cancelled job is gone: KillWait, and epilogues."""


class SlurmJob(JobBlock[Outcome]):
    """Runs a stage through sbatch, or follows the job that already does."""

    _block_type_name = "Slurm Job"
    _block_type_slug = "slurm-job"
    _description = "Runs a stage's own command as a job of Slurm."

    spec: LaunchSpec
    options: SlurmOptions = SlurmOptions()
    poll_seconds: float = 10.0
    """Between two questions to the controller; when a job has ended it is asked at once."""
    hang_seconds: float | None = None
    """Without a line in the log for so long a running job counts as hung."""

    def client(self) -> SlurmClient:
        """How Slurm is talked to."""
        return SlurmClient()

    async def trigger(self) -> SlurmJobRun:
        """Find the job of this key, or submit it, as soon as there is room. Being cancelled
        meanwhile cancels the job."""
        room = SubmitBackoff(self.spec.name, self.options.room_seconds, self.logger)
        return await room.submitted(
            lambda: when_found(self.spec, asyncio.to_thread(self._find_or_submit)),
            ROOM_PAUSE_SECONDS,
        )

    def _find_or_submit(self) -> SlurmJobRun:
        if elsewhere := other_clusters(os.environ):
            raise ConfigError(elsewhere)
        script = render_slurm(self.spec, self.options)
        folder, name, client = Path(self.spec.run_directory), job_name(self.spec), self.client()
        noted = read_note(folder / SUBMITTED, name)
        job_id = client.find(name) if noted is None else str(noted["job_id"])
        if job_id is None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SCRIPT).write_text(script)
            job_id = client.submit(folder / SCRIPT, name)
            note(folder, "submitted", job=job_id)
            self.logger.info("submitted %s as Slurm job %s", self.spec.name, job_id)
        else:
            note(folder, "reattached", job=job_id)
            self.logger.info("%s is Slurm job %s already: following it", self.spec.name, job_id)
        write_note(folder / SUBMITTED, {"name": name, "job_id": job_id})
        return SlurmJobRun(self, client, job_id)


class SlurmJobRun(StageJobRun):
    """A job of Slurm, waiting, running or ended; its log goes to the run's logger."""

    def __init__(self, block: SlurmJob, client: SlurmClient, job_id: str) -> None:
        super().__init__(block.spec, job_id)
        self.job_id = job_id
        self._block = block
        self._client = client
        shares = self.spec.shares
        self._indices: Sequence[int | None] = (None,) if shares is None else shares.indices
        self._followed = Followed(self._folder)
        self._signs = Liveness(self._files_of_life())
        self._told = JobTracker(job_name(self.spec), self._indices, time.monotonic())
        self._said = ""
        self._never = ""
        """Why it will not start, in words; empty while it may."""
        self._never_since = 0.0
        self._ended = False
        # Who waits and who stops look in threads, side by side: a cancellation ends no thread.
        self._asking, self._reading = threading.Lock(), threading.Lock()
        live.add(self)

    # --- waiting ------------------------------------------------------------------------------

    async def _until_ended(self) -> None:
        pace = PollSchedule(self._block.poll_seconds, len(self._indices))
        while not self._ended:
            self._check_stopping()
            await asyncio.to_thread(self._relay)
            if pace.is_due(len(self._left()), time.monotonic()):
                await asyncio.to_thread(self._ask)
                self._check_start()
                self._check_signs()
            if not self._ended:
                await asyncio.sleep(min(TICK_SECONDS, self._block.poll_seconds))

    def _ask(self) -> None:
        """Look what Slurm says, and whether that is the end."""
        with self._asking:  # all of it, or an answer may overtake a later one
            found = self._client.records(self.job_id, self._told.unsettled)
            self.was_answered = True
            if self._told.take_in(found, time.monotonic()):
                self._tell(self._told.records)
                self._note_state(self._told.records)
            left = self._left()
            self._ended = self._told.is_over(left, FORGOTTEN_SECONDS, time.monotonic())

    def _tell(self, records: Sequence[JobRecord]) -> None:
        states = sorted({(r.state, r.reason if r.state == "PENDING" else "") for r in records})
        text = ", ".join(f"{state} ({why})" if why else state for state, why in states)
        if text == self._said:
            return
        self._said = text
        self._log.info("Slurm job %s: %s", self.job_id, text)
        held = {HELD[why] for _, why in states if why in HELD}
        for words in held | {record.never_starts for record in records} - {None}:
            self._log.warning("Slurm job %s will not start: %s", self.job_id, words)

    def _note_state(self, records: Sequence[JobRecord]) -> None:
        """That it waits or runs; of shares, that the first of them does."""
        began = [r.started for r in records if r.started is not None and r.state != "PENDING"]
        if began or any(record.state == "RUNNING" for record in records):
            note(self._folder, "started", at=min(began, default=None), job=self.job_id)
        else:
            note(self._folder, "queued", job=self.job_id)

    def _ended_at(self) -> float | None:
        """As Slurm or else its exit file tells."""
        ends = [r.ended for r in self._told.records if r.ended is not None and r.has_ended]
        ends = ends or [path.stat().st_mtime for path in self._left().values()]
        return max(ends, default=None)

    def _check_start(self) -> None:
        """Cancel a job that a broken node sent back and Slurm holds, as another submission may
        run; and one that has waited for too long for what never comes."""
        if self._stopping is not None:
            return
        if any(record.was_not_started for record in self._told.records):
            self._log.error("Slurm job %s could not be started: ending it", self.job_id)
            self._end(Kind.NODE_FAILURE)
            return
        words = next(filter(None, (record.never_starts for record in self._told.records)), "")
        if not words or self._is_running():
            self._never = ""
            return
        if not self._never:
            self._never_since = time.monotonic()
        self._never = words
        limit = self._block.options.broken_seconds
        if time.monotonic() - self._never_since > limit:
            self._log.error("Slurm job %s did not start in %d s: ending it", self.job_id, limit)
            self._end(Kind.CONFIG)

    def _check_signs(self) -> None:
        """Cancel a job that runs and has said nothing for too long."""
        if self._stopping is not None:
            return
        if not self._is_running():
            self._signs.renew()
            return
        self._end_if_silent(self._signs.silent_seconds(), self._block.hang_seconds)

    def _files_of_life(self) -> Iterator[Path]:
        for index in self._indices:
            yield self._folder / log_name(index)
            yield self._folder / share_folder(index) / HEARTBEAT

    def _is_running(self) -> bool:
        return any(record.state == "RUNNING" for record in self._told.records)

    def _has_ended(self) -> bool:
        return self._ended

    def _left(self) -> dict[int | None, Path]:
        """The exit files that are there."""
        files = ((index, self._folder / share_folder(index) / EXIT) for index in self._indices)
        return {index: path for index, path in files if path.exists()}

    # --- listening ----------------------------------------------------------------------------

    def _relay(self) -> bool:
        """Pass on what the log has got; False when nothing is new."""
        count = 0
        with self._reading:
            for index in self._indices:
                for line in self._followed.read(log_name(index)):
                    count += 1
                    self._say(line, _label(index))
            if count:
                self._followed.remember()
        return count > 0

    async def _hear_the_end(self) -> None:
        """Until the exit file is there, where the script came to its end, and the log stands."""
        came_to_end = any(r.state in ("COMPLETED", "FAILED") for r in self._told.records)
        deadline = time.monotonic() + LATE_SECONDS
        while came_to_end and len(self._left()) < len(self._indices):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(TICK_SECONDS)
        while await asyncio.to_thread(self._relay):
            await asyncio.sleep(TICK_SECONDS)
        for index in self._indices:
            for line in self._followed.finish(log_name(index)):
                self._say(line, _label(index))

    # --- stopping -----------------------------------------------------------------------------

    async def _stop(self) -> None:
        """SIGUSR1, so that training saves; after the grace SIGKILL and scancel, until Slurm
        confirms it. scancel alone would leave it KillWait (30 s) more, and outlast this flow."""
        # First: the controller may be slow, and this flow be killed while it is asked.
        self._note_ending()
        await asyncio.to_thread(self._ask)
        if self._has_ended():
            return
        if self._is_running() and self._ended_by_us is Kind.STOPPED:
            if not self._was_told:
                # Not SIGTERM: that would reach each rank twice, once through torchrun.
                await asyncio.to_thread(self._client.signal_steps, self.job_id, "USR1")
                self._note_ending(is_told=True)
            grace = min(self.spec.grace_seconds, MOST_GRACE_SECONDS)
            self._log.info("Slurm job %s is to save; it is killed in %.0f s", self.job_id, grace)
            await self._wait_until_gone(grace)
            await self._kill_steps()
        if not self._has_ended():
            await asyncio.to_thread(self._client.cancel, self.job_id)
            await self._wait_until_gone(KILL_SECONDS)
        if not self._has_ended():
            raise InfrastructureError(
                f"Slurm job {self.job_id} is still there {KILL_SECONDS:.0f} s after scancel; look "
                f"at its nodes (scontrol show job {self.job_id})"
            )
        self._note_end(self._ended_by_us or Kind.STOPPED)
        self._log.info("Slurm job %s was stopped", self.job_id)

    async def _kill_steps(self) -> None:
        """SIGKILL to what still runs, a few times over: a shell whose program was killed may start
        another before it is, and after scancel Slurm kills no more until KillWait is over."""
        deadline = time.monotonic() + KILL_STEPS_SECONDS
        while not self._has_ended() and time.monotonic() < deadline:
            running = [record for record in self._told.records if record.state == "RUNNING"]
            indices = [index for record in running for index in record.shares]
            await asyncio.to_thread(self._client.kill_steps, self.job_id, indices)
            await self._wait_until_gone(2 * TICK_SECONDS)

    async def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < deadline:
            await asyncio.sleep(min(2 * TICK_SECONDS, self._block.poll_seconds))
            await asyncio.to_thread(self._relay)
            await asyncio.to_thread(self._ask)

    # --- the end ------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        outcomes = {index: self._judge(index) for index in self._indices}
        if self.spec.shares is None:
            return outcomes[None]
        shares = {index: one for index, one in outcomes.items() if index is not None}
        return join_shares(self.spec.name, shares)

    def _judge(self, index: int | None) -> Outcome:
        if self._ended_by_us is Kind.CONFIG:
            return never_started(self.spec.name, self.job_id, self._never)
        seen = gather(self.spec, index, self.job_id, self._told.record(index), self._ended_by_us)
        return classify_exit(self.spec.name, seen)


def _label(index: int | None) -> str:
    return "" if index is None else f"{index}: "
