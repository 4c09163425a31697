"""Who starts the jobs of stages, and what these run in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from flows.backends.slurm.client import other_clusters, run_program
from flows.doctor.check import Answer, Check, State, fail, ok, skipped, warn
from flows.doctor.cluster import cluster_image, cluster_jobs
from flows.doctor.context import YardContext
from flows.doctor.engine import IMAGES_SECONDS, engine_image, engine_jobs
from flows.stage_configs import CONFIGS
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.version import VERSION

SECONDS = 10.0
SMOKE_SECONDS = 40.0

ALIVE = ("idle", "mix", "alloc", "comp", "plnd", "resv")
"""How sinfo's short names of nodes begin that run jobs, or will."""

KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+) sec", re.MULTILINE)
"""Of `scontrol show config`."""


def jobs(yard: YardContext) -> Answer:
    """Whoever starts jobs is there."""
    return JOBS[yard.place.block](yard)


def image(yard: YardContext) -> Answer:
    """What stages run in is there, of our version, and a stage starts in it."""
    return IMAGES[yard.place.block](yard)


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit status of a program, and its output, or the error of one that failed."""
    result = run_program(command, seconds)
    if result.status == 0:
        return 0, result.out.strip()
    return result.status, result.last_line or f"{command[0]}: status {result.status}"


# --- this machine -------------------------------------------------------------------------------


def _process_jobs(yard: YardContext) -> Answer:
    return ok("stages are processes of this machine")


def _process_image(yard: YardContext) -> Answer:
    python = yard.place.python
    command = (python, "-c", "import trainyard.version as v; print(v.VERSION)")
    status, said = run(command, SMOKE_SECONDS)
    if status != 0:
        return fail(
            ConfigError,
            f"{python} has no trainyard: {said}",
            "make install, or name the interpreter that has it: python in the yard's profile",
        )
    if said != VERSION:
        told = f"{python} has trainyard {said}, the flows are {VERSION}"
        return fail(ConfigError, told, "install one version for both")
    status, said = run((python, "-m", "stages.pretrain", "--help"), SMOKE_SECONDS)
    if status != 0:
        return fail(ConfigError, f"stages.pretrain does not start: {said}", "make install")
    return ok(f"trainyard {VERSION} in {python}")


# --- Slurm --------------------------------------------------------------------------------------


def _slurm_jobs(yard: YardContext) -> Answer:
    if elsewhere := other_clusters(os.environ):
        return fail(ConfigError, elsewhere, "unset it; jobs of the yard go to one cluster")
    status, said = run(("scontrol", "ping"), SECONDS)
    if status != 0 or "UP" not in said:
        kind = ConfigError if "not installed" in said else InfrastructureError
        return fail(kind, said, "start slurmctld, or set SLURM_CONF to the cluster's slurm.conf")
    answers = [_partition(yard, name, stages) for name, stages in _partitions(yard).items()]
    answers.append(_kill_wait(yard))
    for state in (State.FAIL, State.WARN):
        for answer in answers:
            if answer.state is state:
                return answer
    return ok(f"slurmctld answers; {'; '.join(answer.told for answer in answers)}")


def _kill_wait(yard: YardContext) -> Answer:
    """What Slurm leaves a training to save in that somebody ends by scancel. A run that is
    cancelled in Prefect's pages has its grace before that."""
    status, said = run(("scontrol", "show", "config"), SECONDS)
    found = KILL_WAIT.search(said)
    if status != 0 or found is None:
        return warn("KillWait is not known", "scontrol show config should tell it")
    seconds, grace = int(found[1]), yard.place.watch_of("pretrain").grace_seconds
    told = f"KillWait {seconds} s"
    if seconds < grace:
        todo = "raise KillWait in slurm.conf, or cancel in Prefect's pages and not by scancel"
        told = f"{told}: scancel leaves a training that to save in, grace_seconds is {grace:g}"
        return warn(told, todo)
    return ok(told)


def _partitions(yard: YardContext) -> dict[str | None, list[str]]:
    """The stages of each partition; None: the one that the site has for those who name none."""
    found: dict[str | None, list[str]] = {}
    for stage in CONFIGS:
        found.setdefault(yard.place.options_of(stage).partition, []).append(stage)
    return found


def _partition(yard: YardContext, partition: str | None, stages: list[str]) -> Answer:
    chosen = (f"--partition={partition}",) if partition else ()
    status, said = run(("sinfo", "--noheader", "--format=%P|%t|%D|%G", *chosen), SECONDS)
    rows = [line.split("|") for line in said.splitlines() if line.count("|") == 3]
    if status != 0 or not rows:
        told = f"there is no partition {partition}" if partition else f"no partition: {said}"
        return fail(ConfigError, told, "correct partition in the yard's [slurm]; sinfo lists them")
    usable = sum(int(row[2]) for row in rows if row[1].startswith(ALIVE) and "*" not in row[1])
    total = sum(int(row[2]) for row in rows)
    where = partition or "all partitions"
    told = f"{usable} of {total} nodes of {where} run jobs"
    if usable == 0:
        return fail(InfrastructureError, told, "sinfo -R tells why; scontrol update state=resume")
    asking = [stage for stage in stages if yard.place.resources_of(stage).gpus_per_node]
    if asking and not any("gpu" in row[3] for row in rows):
        todo = f"choose another partition for {', '.join(asking)}, or lower gpus_per_node"
        return fail(ConfigError, f"{told}, and none has a GPU", todo)
    return warn(told, "sinfo -R tells why") if usable < total else ok(told)


def _slurm_image(yard: YardContext) -> Answer:
    place = yard.place
    if place.options_of("pretrain").containers == "none":
        return skipped(f"jobs use {place.python} of the nodes; --submit tries it")
    name = place.image_of("pretrain") or ""
    if name.startswith("/") and not os.path.exists(name):
        todo = "enroot import or apptainer build it there, or correct image in the yard"
        return fail(ConfigError, f"image {name} is not there", todo)
    if name.startswith("/"):
        return ok(f"{name}; --submit starts it")
    return skipped(f"{name} is fetched by the nodes; --submit tries it")


Look = Callable[[YardContext], Answer]

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
"""By the yard's block."""

CHECKS = (
    # On a busy machine the client of Kubernetes alone takes 20 s to load.
    Check("jobs", jobs, "where-jobs-run", limit_seconds=90.0),
    Check("image", image, "images-and-versions", ("jobs",), limit_seconds=IMAGES_SECONDS),
)
