"""Runs two ranks as a job of the yard's backend: NCCL with GPUs, gloo without.

The job also reports the machine on which stages run (`trainyard.machine`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from flows.backends.outcome import Kind, Outcome, brief
from flows.backends.run_folder import LOG, job_key
from flows.backends.spec import LaunchSpec, Resources
from flows.doctor.check import Check, CheckResult, fail, ok, skipped
from flows.doctor.context import FOLDER, YardContext
from flows.runner.job_blocks import JOB_BLOCKS
from trainyard import json_text
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.machine import Machine

PROBE = "trainyard.parallel.probe"
PROBE_PREFIX = "probe: {"

RANKS_SECONDS = 60.0
"""Limit of the run: both ranks import torch, from a shared file system that may be cold."""

TAKE_CUDA = (
    "{image} must have a torch with CUDA: pretrain = ...:{{version}}-cuda under [images] of the "
    "profile; nvidia-smi in such a job shows its GPUs"
)

QUEUED_SECONDS = 600.0
"""Limit of the wait and run of a scheduler's job."""


def ranks(yard: YardContext) -> CheckResult:
    """Two ranks connect where stages run, and all-reduce."""
    backend = yard.site.backend
    waits = backend in ("slurm", "kubernetes")
    if waits and not yard.submits:
        return skipped("needs a job of the scheduler: --submit starts one with two ranks")
    began = time.monotonic()
    limit = QUEUED_SECONDS if waits else RANKS_SECONDS
    job = probe_job(yard)
    outcome, report = asyncio.run(_run(job, yard, limit))
    if report is None or "error" in report:
        message = (
            str(report["error"]) if report else _describe_end(outcome, Path(job.run_directory, LOG))
        )
        is_wrong = outcome is not None and outcome.kind is Kind.CONFIG
        kind = ConfigError if is_wrong else InfrastructureError
        return fail(kind, message, "NCCL_DEBUG=INFO in the profile's [environment] logs more")
    yard.there = Machine.from_document(report["machine"])
    _remove(Path(job.run_directory), Path(yard.site.run_folder))
    if lacking := without_gpus(report, job.resources):
        return fail(ConfigError, lacking, TAKE_CUDA.format(image=job.image or "what is installed"))
    return ok(f"{described(report)}, in {time.monotonic() - began:.0f} s")


def _remove(folder: Path, root: Path) -> None:
    """Remove the run folder of a job that succeeded, and the empty folders above it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: in use
        for empty in (folder.parent, root, root.parent):
            if empty.name in ("doctor", FOLDER, root.name):
                empty.rmdir()


def without_gpus(report: dict[str, Any], wanted: Resources) -> str:
    """Why ranks cannot train on their GPUs; empty if they can."""
    asked = wanted.gpus_per_node
    if asked == 0:
        return ""
    if report["devices"] < asked:
        build = f"CUDA {report['cuda']}" if report["cuda"] else "without CUDA"
        return (
            f"{described(report)}; they have {asked} GPUs a node, and torch ({build}) sees "
            f"{report['devices']}"
        )
    has_one_each = asked * wanted.nodes >= report["ranks"]
    if has_one_each and report["backend"] != "nccl":
        return f"{described(report)}; between GPUs it must be nccl"
    return ""


def described(report: dict[str, Any]) -> str:
    """The report of the ranks as one line."""
    version = f" {report['nccl']}" if report["nccl"] else ""
    speed = report["bytes_per_second"] / 1e9
    return (
        f"{report['ranks']} ranks on {', '.join(report['hosts'])} "
        f"over {report['backend']}{version}, all-reduce {speed:.1f} GB/s, torch {report['torch']}"
    )


def _describe_end(outcome: Outcome | None, log: Path) -> str:
    """How the job ended whose ranks reported nothing, and the last line of its log."""
    message = "they did not end in time, and were stopped"
    if outcome is not None:
        message = f"{outcome.kind}: {outcome.message}" if outcome.message else str(outcome.kind)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{message}: {last} ({log})" if last else f"{message} ({log.parent})"


def probe_job(yard: YardContext) -> LaunchSpec:
    """The job: two nodes if training has several, else two processes on one."""
    site = yard.site
    wanted = site.resources_of("pretrain")
    folder = Path(site.run_folder, "doctor", f"{time.strftime('%Y%m%d-%H%M%S')}-{_short()}")
    is_spread = wanted.nodes > 1
    command = (site.python, "-m", PROBE, "--ranks", "2", "--seconds", f"{RANKS_SECONDS - 10:.0f}")
    resources = Resources(
        nodes=2 if is_spread else 1,
        gpus_per_node=min(wanted.gpus_per_node, 1 if is_spread else 2),
        cpus_per_node=wanted.cpus_per_node and min(wanted.cpus_per_node, 2),
        time_limit_seconds=600,
    )
    return LaunchSpec(
        name="doctor",
        command=command,
        run_directory=str(folder),
        environment=site.environment,
        resources=resources,
        image=site.image_of("pretrain"),
        mounts=site.mounts,
        key=job_key(_short(), "doctor", 1),
        rank_launcher=(site.python, "-m", "torch.distributed.run"),
    )


def _short() -> str:
    return uuid.uuid4().hex[:8]


async def _run(
    spec: LaunchSpec, yard: YardContext, limit_seconds: float
) -> tuple[Outcome | None, dict[str, Any] | None]:
    """The outcome, None at the time limit, and the report of the ranks, None without one."""
    Path(spec.run_directory).mkdir(parents=True, exist_ok=True)
    outcome = None
    with _logging_off():
        run = await JOB_BLOCKS[yard.site.backend](yard.site, spec, "pretrain").trigger()
        try:
            await asyncio.wait_for(run.wait_for_completion(), limit_seconds)
            outcome = await run.fetch_result()
        except TimeoutError:
            await run.stop()
    log = Path(spec.run_directory, LOG)
    text = log.read_text(errors="replace") if log.exists() else ""
    return outcome, report_in(text)


def report_in(text: str) -> dict[str, Any] | None:
    """What the ranks reported in their log, an error first; None without a report.

    Lines may be cut, or mixed with those of another rank: such a report is an error too if there is
    no other."""
    reports, broken = [], ""
    for line in text.splitlines():
        _, mark, rest = line.partition(PROBE_PREFIX)
        if not mark:
            continue
        with contextlib.suppress(ValueError, LookupError, TypeError):
            report = json_text.loads("{" + rest)
            if "error" not in report:
                described(report)  # raises if it lacks anything
                Machine.from_document(report["machine"])
            reports.append(report)
            continue
        broken = broken or brief(line)
    if not reports and broken:
        reports = [{"error": f"the report of a rank is cut short or mixed with others: {broken}"}]
    return next((one for one in reports if "error" in one), next(iter(reports), None))


@contextlib.contextmanager
def _logging_off() -> Any:
    """Hide the job's lines, which are in its log, from the table."""
    logger = logging.getLogger("prefect")
    before, logger.disabled = logger.level, True
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        logger.disabled = False
        logger.setLevel(before)


CHECKS = (Check("ranks", ranks, "ranks-and-nccl", ("jobs",), QUEUED_SECONDS + RANKS_SECONDS),)
