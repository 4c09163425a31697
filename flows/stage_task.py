"""The one task: write the config document, start the stage's own command through a block, wait, and
read the manifest back.

What comes back is a summary for people; the artifact itself stays in the store."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from prefect import get_run_logger, task
from prefect.client.schemas.objects import State, TaskRun

from flows.blocks.process import LOG, ProcessJob
from flows.console import Log, headline
from flows.job import StageJob
from flows.launch.outcome import KINDS, Kind, Outcome, StageError, read_outcome
from flows.launch.spec import LaunchSpec, Resources
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.errors import TrainyardError

BLOCKS = {"process": ProcessJob}
"""Where a stage can run, by the name a yard gives."""

KEPT_ATTEMPTS = 10
"""Run folders (config, log, failure) kept for each job."""

RETRY_DELAYS_SECONDS = [5, 30]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the stages of a flow run, and where their run folders lie."""

    run_folder: str
    """Local folder: DIR/JOB/ATTEMPT/ holds config.toml, log.txt, outcome.json or failure.json."""
    block: str = "process"
    environment: dict[str, str] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    python: str = sys.executable


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a flow keeps of a stage that ended well."""

    job: str
    stage: str
    reused: bool
    reason: str
    """Why it ran; empty when it did not."""
    seconds: float
    output_digest: str = ""
    manifest_url: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


async def worth_retrying(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """True for exit status 3 alone: a wrong option or a broken file is the same the next time."""
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, StageError) and error.outcome.may_succeed_later


@task(
    task_run_name="{job.name}",
    retries=len(RETRY_DELAYS_SECONDS),
    retry_delay_seconds=list(RETRY_DELAYS_SECONDS),
    retry_condition_fn=worth_retrying,
    persist_result=False,
)
async def run_stage_task(job: StageJob, place: Place) -> Summary:
    """Run one stage to its end; raises StageError."""
    log = get_run_logger()
    headline(log, job.name, "runs")
    began = time.monotonic()
    spec = _prepare(job, place)
    try:
        run = await BLOCKS[place.block](spec=spec).trigger()
        await run.wait_for_completion()
    except asyncio.CancelledError:
        headline(log, job.name, "stopped", time.monotonic() - began)
        raise
    outcome = await run.fetch_result()
    seconds = time.monotonic() - began
    if outcome.kind is not Kind.DONE:
        raise _failed(log, outcome, spec, seconds)
    try:
        summary = await asyncio.to_thread(_summarise, job, spec, seconds)
    except TrainyardError as error:
        raise _failed(log, _unreadable(job, error), spec, seconds) from error
    state = "reused" if summary.reused else "done"
    headline(log, job.name, state, seconds, summary.output_digest[:12], summary.reason)
    return summary


def _failed(log: Log, outcome: Outcome, spec: LaunchSpec, seconds: float) -> StageError:
    error = StageError(outcome, str(Path(spec.run_directory, LOG)))
    headline(log, outcome.name, "failed", seconds, "", str(outcome.kind), logging.ERROR)
    return error


def _unreadable(job: StageJob, error: TrainyardError) -> Outcome:
    status = error.exit_status
    return Outcome(name=job.name, kind=KINDS[status], exit_status=status, message=str(error))


def _prepare(job: StageJob, place: Place) -> LaunchSpec:
    """Make the run folder of a new attempt, with the config document in it."""
    attempts = Path(place.run_folder, job.name).absolute()
    attempts.mkdir(parents=True, exist_ok=True)
    for old in sorted(attempts.iterdir())[: 1 - KEPT_ATTEMPTS]:
        shutil.rmtree(old, ignore_errors=True)
    folder = attempts / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    folder.mkdir()
    document = folder / "config.toml"
    given = {key: value for key, value in job.document.items() if value is not None}
    document.write_bytes(tomli_w.dumps(given).encode())
    return LaunchSpec(
        name=job.name,
        command=(place.python, "-m", f"stages.{job.stage}", "--config", str(document)),
        run_directory=str(folder),
        environment=place.environment,
        resources=place.resources,
    )


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
