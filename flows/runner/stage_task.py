"""The one Prefect task: write the config document, run the stage in a backend, read the manifest.

The task returns a summary; the artifact stays in the store. `should_retry` decides whether a failed
task runs again.

The job of a scheduler outlives this program. The name of its run folder is its key, and the folder
has a file (SETTLED) once its end is known. The task follows a job without that file instead of
submitting another. If the job was being cancelled when its flow was killed, the task first follows
it to its end."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from prefect import get_run_logger, runtime, task
from prefect.client.schemas.objects import State, TaskRun

from flows.backends.outcome import (
    KINDS,
    Kind,
    Outcome,
    StageError,
    brief,
    read_failure,
    read_outcome,
)
from flows.backends.run_folder import (
    LOG,
    NOT_BEGUN,
    is_being_cancelled,
    job_key,
    log_name,
    make_run_folder,
    read_record,
    run_folder_io,
    submission_of,
)
from flows.backends.spec import LaunchSpec, Shares
from flows.logs.console import Log, headline
from flows.pages.stage_pages import SUBMITTED as SUBMITTED_FILES
from flows.pages.stage_pages import show_failed, show_stage
from flows.recipes.stage_job import StageJob
from flows.recipes.summary import Summary
from flows.runner.cancellation import saved_steps
from flows.runner.limits import take_slot
from flows.runner.retry import (
    CLAIM_HELD,
    MOST_RETRIES,
    FailedAttempts,
    no_retry_reason,
    reached_step,
    with_jitter,
)
from flows.runner.run_name import name_and_id
from flows.runner.stage_spec import DOCUMENT, stage_document, stage_spec
from flows.runner.submission import SETTLED, follow
from flows.runner.wait_state import OTHER_RUN, RETRY, STORE, wait_state
from flows.yard.profile import SCHEDULED, StageEnvironment
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.replace_file import replace_file
from trainyard.errors import ConfigError, InfrastructureError, Stopped, TrainyardError

_failed_attempts: dict[str, FailedAttempts] = {}
"""By task run, in this program only: a flow that a person starts again has all attempts again."""


async def should_retry(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Whether Prefect runs the failed task again: the infrastructure failed, and the attempts are
    not used up."""
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, StageError) and error.is_retryable


@task(
    task_run_name="{job.name}",
    retries=MOST_RETRIES,
    retry_delay_seconds=0,  # the pause is ours
    retry_condition_fn=should_retry,
    persist_result=False,
)
async def run_stage_task(job: StageJob, site: StageEnvironment) -> Summary:
    """One attempt at a stage; raises StageError, after which `should_retry` decides.

    Begins with the pause that the failed attempts before it call for."""
    await take_slot()
    task_run = str(runtime.task_run.id or "")
    failed = FailedAttempts()
    if task_run:
        failed = _failed_attempts.setdefault(task_run, failed)
    if failed.pause_seconds:
        seconds = with_jitter(failed.pause_seconds)
        note = f"retries in {seconds:.0f} s"
        headline(get_run_logger(), job.name, "waits", note=note)
        wait_state().wait(job.name, *_why(failed.last, note))
        await asyncio.sleep(seconds)
        wait_state().end_wait(job.name)
    try:
        with wait_state().working(job.name):
            return await _attempt(job, site)
    except StageError as error:
        if not error.outcome.is_retryable:
            raise
        failed.last = error.outcome
        if error.outcome.error == CLAIM_HELD:
            failed.record_claim_held()
            raise
        failed.record(await asyncio.to_thread(reached_step, job, error.outcome))
        if failed.fruitless < site.fruitless_attempts:
            raise
        reason = no_retry_reason(failed)
        get_run_logger().error("%s: %s", job.name, reason)
        raise StageError(error.outcome, error.log, reason) from error


def _why(last: Outcome | None, pause: str) -> tuple[str, str]:
    """The state of a run whose stage waits after a failed attempt, and why it waits."""
    if last is None:
        return RETRY, pause
    names = {CLAIM_HELD: OTHER_RUN, InfrastructureError.__name__: STORE}
    return names.get(last.error, RETRY), f"{pause}: {last.how}: {brief(last.message)}"


async def _attempt(job: StageJob, site: StageEnvironment) -> Summary:
    log = get_run_logger()
    headline(log, job.name, "runs")
    began = time.monotonic()
    spec: LaunchSpec | None = None
    try:
        spec = _prepare(job, site)
        was_cancelled = is_being_cancelled(spec)
        outcome = await follow(job.stage, site, spec)
        if was_cancelled and outcome.kind is Kind.STOPPED:
            spec = _prepare(job, site)
            outcome = await follow(job.stage, site, spec)
        seconds = time.monotonic() - began
        if outcome.kind is not Kind.DONE:
            raise await _failed(log, job, outcome, spec, seconds)
        summary = await asyncio.to_thread(_summarise, job, spec, seconds)
    except asyncio.CancelledError:
        note = "" if spec is None else _saved(spec)
        headline(log, job.name, "stopped", time.monotonic() - began, note=note)
        raise
    except TrainyardError as error:
        seconds = time.monotonic() - began
        status = error.exit_status
        outcome = Outcome(name=job.name, kind=KINDS[status], exit_status=status, message=str(error))
        why = f": {error}"  # the stage has no log that says so
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
    """spec: None if the run folder, and so the log, could not be created."""
    error = StageError(outcome, "" if spec is None else _log_of(spec, outcome.failed_shares))
    headline(log, outcome.name, "failed", seconds, "", f"{outcome.how}{why}", logging.ERROR)
    await show_failed(job.stage, outcome, seconds, error.log)
    return error


def _log_of(spec: LaunchSpec, shares: Sequence[int] = ()) -> str:
    """The log of a job, or of the first of these shares; without one, what was submitted."""
    names = (LOG, *map(log_name, shares), *SUBMITTED_FILES)
    paths = [Path(spec.run_directory, name) for name in names]
    return str(next((path for path in paths if path.exists()), ""))


def _saved(spec: LaunchSpec) -> str:
    """The step that a stopped training saved, as a note, and for the last line of the program."""
    failure = read_failure(spec.run_directory) or {}
    step = failure.get("step")
    if failure.get("class") != Stopped.__name__ or not isinstance(step, int):
        return ""
    saved_steps[spec.name] = step
    return f"saved step {step:,}"


def _prepare(job: StageJob, site: StageEnvironment) -> LaunchSpec:
    """Create the run folder of a new attempt with its config document, or find that of a submission
    whose end is not known. Raises InfrastructureError if its disk is full or unavailable."""
    attempts = Path(site.run_folder, job.name).absolute()
    with run_folder_io(attempts, NOT_BEGUN):
        try:
            attempts.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(
                f"run folder {attempts} cannot be created ({error}): name another run_folder in "
                f"the profile"
            ) from error
        key = ""
        if site.backend in SCHEDULED:
            key = next_key(attempts, runtime.flow_run.id or uuid.uuid4().hex)
        folder = attempts / (key or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}")
        document = folder / DOCUMENT
        if not document.exists():
            make_run_folder(folder)
            replace_file(document, tomli_w.dumps(stage_document(job, site)).encode())
        shares = _shares(job, site, attempts, key)
    return stage_spec(job, site, folder, key, shares, name_and_id())


def _shares(job: StageJob, site: StageEnvironment, attempts: Path, key: str) -> Shares | None:
    """The shares to make: all, or in a retry those that failed; None for a job without shares."""
    if job.num_shares == 0:
        return None
    count, failed = job.num_shares, []
    # A process has no key: there, finished shares end at once.
    if key and (submission := submission_of(key)) > 1:
        last = attempts / f"{key.rpartition('-')[0]}-{submission - 1}" / SETTLED
        failed = (read_record(last) or {}).get("shares", [])
    return Shares(count=count, only=tuple(failed), at_once=site.shares_at_once)


def next_key(attempts: Path, flow_run: str) -> str:
    """The key of the submission whose end is not known, else of the next one.

    attempts: the folder of all runs of this job; it distinguishes jobs of one name in two yards."""
    submission = 1
    while (attempts / job_key(flow_run, str(attempts), submission) / SETTLED).exists():
        submission += 1
    return job_key(flow_run, str(attempts), submission)


def _summarise(job: StageJob, spec: LaunchSpec, seconds: float) -> Summary:
    outcome = read_outcome(spec.run_directory) or {}
    output = job.output
    manifest = Manifest(stage=job.stage)
    if output is not None:
        found = read_manifest(output.manifest_url)
        if found is None:
            raise TrainyardError(f"the stage succeeded, but {output.manifest_url} does not exist")
        manifest = found[0]
    metrics = manifest.metrics
    if job.num_runs > 1:
        runs = outcome.get("runs", [])
        if len(runs) != job.num_runs:
            raise TrainyardError(
                f"the stage succeeded, but reports {len(runs)} of {job.num_runs} runs"
            )
        metrics = {"outputs": len(runs), "made": sum(r["outcome"] == "ran" for r in runs)}
    return Summary(
        job=job.name,
        stage=job.stage,
        reused=outcome.get("outcome") == "noop",
        reason=str(outcome.get("reason") or ""),
        seconds=round(seconds, 3),
        output_digest=manifest.output_digest if output is not None else "",
        manifest_url=output.manifest_url if output is not None else "",
        num_runs=job.num_runs,
        metrics=metrics,
        log=_log_of(spec, spec.shares.indices if spec.shares else ()),
    )
