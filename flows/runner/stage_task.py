"""The one task: write the config document, start the stage's own command through a block, wait, and
read the manifest back.

What comes back is a summary for people; the artifact itself stays in the store. Behind a scheduler
the job outlives this program: its run folder is named after the key that it is found again by, and
bears a mark once its end is known, so that what is not settled is followed and not submitted. One
that was being cancelled when its flow was killed is seen to its end, and another submitted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from pathlib import Path
from typing import Any

import tomli_w
from prefect import get_run_logger, runtime, task
from prefect.client.schemas.objects import State, TaskRun

from flows.backends.outcome import KINDS, Kind, Outcome, StageError, read_outcome
from flows.backends.run_folder import (
    LOG,
    NOT_BEGUN,
    is_being_cancelled,
    job_key,
    run_folder_io,
    submission_of,
)
from flows.backends.spec import LaunchSpec, Shares
from flows.logs.console import Log, headline
from flows.pages.stage_pages import show_failed, show_stage
from flows.recipes.stage_job import StageJob
from flows.recipes.summary import Summary
from flows.runner.limits import take_slot
from flows.runner.retry import HELD, MOST_RETRIES, Trying, given_up, reached_step, with_jitter
from flows.runner.stage_spec import DOCUMENT, stage_document, stage_spec
from flows.runner.submission import SETTLED, follow
from flows.yard.profile import SCHEDULED, StageEnvironment
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.errors import ConfigError, TrainyardError

_tryings: dict[str, Trying] = {}
"""By task run. Only as long as this program: whoever starts a flow again wants it tried again."""


async def worth_retrying(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """True for infrastructure alone, as long as attempts get further (flows/runner/retry.py)."""
    error = await state.aresult(raise_on_failure=False)
    if not isinstance(error, StageError) or error.given_up:
        return False
    return error.outcome.may_succeed_later


@task(
    task_run_name="{job.name}",
    retries=MOST_RETRIES,
    retry_delay_seconds=0,  # the pause is ours
    retry_condition_fn=worth_retrying,
    persist_result=False,
)
async def run_stage_task(job: StageJob, place: StageEnvironment) -> Summary:
    """Run one stage to its end, in as many attempts as are worth it; raises StageError."""
    await take_slot()
    task_run = str(runtime.task_run.id or "")
    trying = _tryings.setdefault(task_run, Trying()) if task_run else Trying()
    await _pause(job, trying)
    try:
        return await _attempt(job, place)
    except StageError as error:
        if not error.outcome.may_succeed_later:
            raise
        if error.outcome.error == HELD:
            trying.note_held()
            raise
        trying.note(await asyncio.to_thread(reached_step, job, error.outcome))
        if trying.fruitless < place.fruitless_attempts:
            raise
        reason = given_up(trying)
        get_run_logger().error("%s: %s", job.name, reason)
        raise StageError(error.outcome, error.log, reason) from error


async def _pause(job: StageJob, trying: Trying) -> None:
    """Before an attempt that follows on another."""
    if trying.pause_seconds:
        seconds = with_jitter(trying.pause_seconds)
        headline(get_run_logger(), job.name, "waits", note=f"tried again in {seconds:.0f} s")
        await asyncio.sleep(seconds)


async def _attempt(job: StageJob, place: StageEnvironment) -> Summary:
    log = get_run_logger()
    headline(log, job.name, "runs")
    began = time.monotonic()
    spec: LaunchSpec | None = None
    try:
        spec = _prepare(job, place)
        was_cancelled = is_being_cancelled(spec)
        outcome = await follow(job.stage, place, spec)
        if was_cancelled and outcome.kind is Kind.STOPPED:
            spec = _prepare(job, place)
            outcome = await follow(job.stage, place, spec)
        seconds = time.monotonic() - began
        if outcome.kind is not Kind.DONE:
            raise await _failed(log, job, outcome, spec, seconds)
        summary = await asyncio.to_thread(_summarise, job, spec, seconds)
    except asyncio.CancelledError:
        headline(log, job.name, "stopped", time.monotonic() - began)
        raise
    except TrainyardError as error:
        seconds = time.monotonic() - began
        outcome = _told(job, error)
        why = f": {error}"  # no log of the stage tells
        raise await _failed(log, job, outcome, spec, seconds, why) from error
    await show_stage(summary)
    state = "reused" if summary.reused else "done"
    headline(log, job.name, state, seconds, summary.output_digest[:12], summary.reason)
    return summary


async def _failed(
    log: Log,
    job: StageJob,
    outcome: Outcome,
    spec: LaunchSpec | None,
    seconds: float,
    why: str = "",
) -> StageError:
    """spec: None where there is no run folder, and so no log, for want of room."""
    error = StageError(outcome, "" if spec is None else str(Path(spec.run_directory, LOG)))
    headline(log, outcome.name, "failed", seconds, "", f"{outcome.how}{why}", logging.ERROR)
    await show_failed(job.stage, outcome, seconds, error.log)
    return error


def _told(job: StageJob, error: TrainyardError) -> Outcome:
    status = error.exit_status
    return Outcome(name=job.name, kind=KINDS[status], exit_status=status, message=str(error))


def _prepare(job: StageJob, place: StageEnvironment) -> LaunchSpec:
    """Make the run folder of a new attempt, with the config document in it; or find that of one
    that is not settled. Raises InfrastructureError where its disk is full or away."""
    attempts = Path(place.run_folder, job.name).absolute()
    with run_folder_io(attempts, NOT_BEGUN):
        _make(attempts)
        key = ""
        if place.block in SCHEDULED:
            key = next_key(attempts, runtime.flow_run.id or uuid.uuid4().hex)
        folder = attempts / (key or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}")
        document = folder / DOCUMENT
        if not document.exists():
            folder.mkdir(exist_ok=True)
            being_written = folder / "config.tmp"
            being_written.write_bytes(tomli_w.dumps(stage_document(job, place)).encode())
            being_written.replace(document)
        shares = _shares(job, place, attempts, key)
    return stage_spec(job, place, folder, key, shares)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(
            f"run folder {folder} cannot be made ({error}): name another run_folder in the profile"
        ) from error


def _shares(job: StageJob, place: StageEnvironment, attempts: Path, key: str) -> Shares | None:
    """All shares of a job that is made in some; of one tried again, those that failed."""
    if job.num_shares == 0:
        return None
    count, submission = job.num_shares, submission_of(key)
    failed: list[int] = []
    if submission > 1:
        last = attempts / f"{key.rpartition('-')[0]}-{submission - 1}" / SETTLED
        failed = json.loads(last.read_text()).get("shares", [])
    return Shares(count=count, only=tuple(failed), at_once=place.shares_at_once)


def next_key(attempts: Path, flow_run: str) -> str:
    """The key of the submission that is not settled, or of the first that was not yet made.

    attempts: the folder of all runs of this job; it tells jobs of one name in two yards apart."""
    submission = 1
    while (attempts / job_key(flow_run, str(attempts), submission) / SETTLED).exists():
        submission += 1
    return job_key(flow_run, str(attempts), submission)


def _summarise(job: StageJob, spec: LaunchSpec, seconds: float) -> Summary:
    said = read_outcome(spec.run_directory) or {}
    output = job.output
    manifest = Manifest(stage=job.stage)
    if output is not None:
        found = read_manifest(output.manifest_url)
        if found is None:
            raise TrainyardError(f"the stage ended well, yet {output.manifest_url} is not there")
        manifest = found[0]
    return Summary(
        job=job.name,
        stage=job.stage,
        reused=said.get("outcome") == "noop",
        reason=str(said.get("reason") or ""),
        seconds=round(seconds, 3),
        output_digest=manifest.output_digest if output is not None else "",
        manifest_url=output.manifest_url if output is not None else "",
        metrics=manifest.metrics,
        log=str(Path(spec.run_directory, LOG)),
    )
