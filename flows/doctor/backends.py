"""Checks of the backend that starts jobs, and of the environment that jobs run in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from flows.backends.slurm.client import other_clusters, run_program
from flows.doctor.check import Check, CheckResult, State, fail, ok, skipped, warn
from flows.doctor.cluster import cluster_image, cluster_jobs
from flows.doctor.context import YardContext
from flows.doctor.engine import IMAGES_SECONDS, engine_image, engine_jobs
from flows.stage_configs import CONFIGS
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.version import VERSION

SECONDS = 10.0
SMOKE_SECONDS = 40.0

ALIVE = ("idle", "mix", "alloc", "comp", "plnd", "resv")
"""Prefixes of sinfo's compact states of nodes that run jobs now or soon."""

KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+) sec", re.MULTILINE)
"""In the output of `scontrol show config`."""


def jobs(yard: YardContext) -> CheckResult:
    """The backend answers."""
    return JOBS[yard.site.backend](yard)


def image(yard: YardContext) -> CheckResult:
    """The image or interpreter of stages exists, is of our version, and a stage starts in it."""
    return IMAGES[yard.site.backend](yard)


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit status of a program, and its output; if it failed, its error."""
    result = run_program(command, seconds)
    if result.status == 0:
        return 0, result.out.strip()
    return result.status, result.last_line or f"{command[0]}: status {result.status}"


# --- this machine -------------------------------------------------------------------------------


def _process_jobs(yard: YardContext) -> CheckResult:
    return ok("stages are processes on this machine")


def _process_image(yard: YardContext) -> CheckResult:
    python = yard.site.python
    command = (python, "-c", "import trainyard.version as v; print(v.VERSION)")
    status, output = run(command, SMOKE_SECONDS)
    if status != 0:
        return fail(
            ConfigError,
            f"{python} has no trainyard: {output}",
            "make install, or name the interpreter that has it: python in the yard's profile",
        )
    if output != VERSION:
        message = f"{python} has trainyard {output}, the flows have {VERSION}"
        return fail(ConfigError, message, "install one version for both")
    status, output = run((python, "-m", "stages.pretrain", "--help"), SMOKE_SECONDS)
    if status != 0:
        return fail(ConfigError, f"stages.pretrain does not start: {output}", "make install")
    return ok(f"trainyard {VERSION} in {python}")


# --- Slurm --------------------------------------------------------------------------------------


def _slurm_jobs(yard: YardContext) -> CheckResult:
    if elsewhere := other_clusters(os.environ):
        return fail(ConfigError, elsewhere, "unset it; all jobs of the yard go to one cluster")
    status, output = run(("scontrol", "ping"), SECONDS)
    if status != 0 or "UP" not in output:
        kind = ConfigError if "not installed" in output else InfrastructureError
        return fail(kind, output, "start slurmctld, or set SLURM_CONF to the cluster's slurm.conf")
    answers = [_partition(yard, name, stages) for name, stages in _partitions(yard).items()]
    answers.append(_kill_wait(yard))
    for state in (State.FAIL, State.WARN):
        for answer in answers:
            if answer.state is state:
                return answer
    return ok(f"slurmctld answers; {'; '.join(answer.message for answer in answers)}")


def _kill_wait(yard: YardContext) -> CheckResult:
    """KillWait is long enough: the time that scancel leaves a training to save. A run that is
    cancelled in Prefect's pages gets its grace before that."""
    status, output = run(("scontrol", "show", "config"), SECONDS)
    found = KILL_WAIT.search(output)
    if status != 0 or found is None:
        return warn("KillWait is not known", "scontrol show config should print it")
    seconds, grace = int(found[1]), yard.site.watch_of("pretrain").grace_seconds
    message = f"KillWait {seconds} s"
    if seconds < grace:
        todo = "raise KillWait in slurm.conf, or cancel in Prefect's pages and not by scancel"
        message = (
            f"{message}: the time scancel leaves a training to save; grace_seconds is {grace:g}"
        )
        return warn(message, todo)
    return ok(message)


def _partitions(yard: YardContext) -> dict[str | None, list[str]]:
    """The stages of each partition; None is the default partition of the cluster."""
    found: dict[str | None, list[str]] = {}
    for stage in CONFIGS:
        found.setdefault(yard.site.options_of(stage).partition, []).append(stage)
    return found


def _partition(yard: YardContext, partition: str | None, stages: list[str]) -> CheckResult:
    chosen = (f"--partition={partition}",) if partition else ()
    status, output = run(("sinfo", "--noheader", "--format=%P|%t|%D|%G", *chosen), SECONDS)
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 3]
    if status != 0 or not rows:
        message = f"no partition {partition}" if partition else f"no partition: {output}"
        return fail(ConfigError, message, "correct partition in [slurm]; sinfo lists them")
    usable = sum(int(row[2]) for row in rows if row[1].startswith(ALIVE) and "*" not in row[1])
    total = sum(int(row[2]) for row in rows)
    where = partition or "all partitions"
    message = f"{usable} of {total} nodes of {where} run jobs"
    if usable == 0:
        return fail(InfrastructureError, message, "sinfo -R says why; scontrol update state=resume")
    asking = [stage for stage in stages if yard.site.resources_of(stage).gpus_per_node]
    if asking and not any("gpu" in row[3] for row in rows):
        todo = f"choose another partition for {', '.join(asking)}, or lower gpus_per_node"
        return fail(ConfigError, f"{message}, and none has a GPU", todo)
    return warn(message, "sinfo -R says why") if usable < total else ok(message)


def _slurm_image(yard: YardContext) -> CheckResult:
    site = yard.site
    if site.options_of("pretrain").containers == "none":
        return skipped(f"jobs use {site.python} of the nodes; --submit tries it")
    name = site.image_of("pretrain") or ""
    if name.startswith("/") and not os.path.exists(name):
        todo = "enroot import or apptainer build it there, or correct image in the yard"
        return fail(ConfigError, f"image {name} does not exist", todo)
    if name.startswith("/"):
        return ok(f"{name}; --submit starts it")
    return skipped(f"the nodes fetch {name}; --submit tries it")


Look = Callable[[YardContext], CheckResult]

JOBS: dict[str, Look] = {
    "process": _process_jobs,
    "container": engine_jobs,
    "slurm": _slurm_jobs,
    "kubernetes": cluster_jobs,
}
IMAGES: dict[str, Look] = {
    "process": _process_image,
    "container": engine_image,
    "slurm": _slurm_image,
    "kubernetes": cluster_image,
}
"""By the yard's backend."""

CHECKS = (
    # On a busy machine the Kubernetes client alone takes 20 s to load.
    Check("jobs", jobs, "where-jobs-run", limit_seconds=90.0),
    Check("image", image, "images-and-versions", ("jobs",), limit_seconds=IMAGES_SECONDS),
)
