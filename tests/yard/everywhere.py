"""One recipe in every place that stages can run in: by its profile, or through docker compose."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import tomli_w
from prefect.logging import disable_run_logger

from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import read_recipe
from flows.recipes.stage_job import StageJob
from flows.runner.stage_task import run_stage_task
from flows.yard.read_profile import read_profile
from tests.yard.compose.engine import REGISTRY, Compose
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.yard import ROOT
from trainyard.artifacts.manifest import read_manifest

Wanted = Callable[[StageJob], bool]

RUN = ("run", "--rm", "--no-TTY", "--env", "OMP_NUM_THREADS=1")
STAGE_SECONDS = 900

ONE_THREAD = """
[environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{root}"
GLOO_SOCKET_IFNAME = "{interface}"
"""

PROCESS = 'block = "process"\n[environment]\nOMP_NUM_THREADS = "1"\n'

CONTAINER = f"""
block = "container"
image = "{REGISTRY}/{{{{stage}}}}:{{{{version}}}}"

[[mounts]]
source = "{{folder}}"
target = "{{folder}}"
read_only = false

[container]
pull = "never"
shared_memory = "256m"
network = "host"

[environment]
OMP_NUM_THREADS = "1"
"""

SLURM = f"""
block = "slurm"

[slurm]
warning_seconds = 30

[resources]
cpus_per_node = 1

[resources.pretrain]
nodes = 2
{ONE_THREAD}"""

KUBERNETES = f"""
block = "kubernetes"
image = "yard/cpu:1"
python = "{{python}}"

[kubernetes]
namespace = "yard"
kubeconfig = "{{kubeconfig}}"
claims = [{{{{ name = "yard", target = "{{folder}}" }}}}]

[resources.pretrain]
nodes = 2
{ONE_THREAD}"""


def write_profile(place: str, folder: Path, fake: FakeKube | None = None) -> Path:
    """The profile of a place whose jobs see one folder of this machine; its path."""
    text = {"process": PROCESS, "container": CONTAINER, "slurm": SLURM, "kubernetes": KUBERNETES}
    filled = text[place].format(
        folder=folder,
        root=ROOT,
        python=sys.executable,
        kubeconfig=fake.kubeconfig if fake is not None else "",
        interface={"slurm": "eth0"}.get(place, "lo"),
    )
    path = folder / f"{place}.toml"
    path.write_text(filled)
    return path


def digests(jobs: Iterable[StageJob]) -> dict[str, str]:
    """What jobs have made, by their names."""
    made = {}
    for job in jobs:
        assert job.output is not None
        found = read_manifest(job.output.manifest_url)
        assert found is not None, f"{job.name} made no {job.output.manifest_url}"
        made[job.name] = found[0].output_digest
    return made


def by_block(recipe: Path, profile: Path, root: str, wanted: Wanted) -> dict[str, str]:
    """Run jobs of a recipe by the block of a profile; the digests of what they made."""
    place = read_profile(str(profile))
    written = read_recipe(str(recipe), root)
    jobs = [job for job in pretrain_jobs(written, place.training_resources()).all() if wanted(job)]
    with disable_run_logger():
        for job in jobs:
            asyncio.run(run_stage_task.fn(job, place.stage_environment(written.root)))
    return digests(jobs)


def by_compose(recipe: Path, yard: Compose, root: str, wanted: Wanted) -> dict[str, str]:
    """Run jobs of a recipe by `docker compose run --rm STAGE`; the digests of what they made."""
    jobs = [job for job in pretrain_jobs(read_recipe(str(recipe), root)).all() if wanted(job)]
    for job in jobs:
        document = {name: value for name, value in job.document.items() if value is not None}
        config = yard.home / f"{job.name}.toml"
        config.write_text(tomli_w.dumps(document))
        service = job.stage.replace("_", "-")
        yard.run(*RUN, service, "--config", str(config), seconds=STAGE_SECONDS)
    return digests(jobs)


def start_store(yard: Compose) -> dict[str, str]:
    """Bring up the store of a yard, alone, with its bucket: the variables that lead to it."""
    yard.run("up", "--detach", "--wait", "--no-build", "store")
    leading = {
        "AWS_ENDPOINT_URL": f"http://{yard.address('store', 8333)}",
        "AWS_ACCESS_KEY_ID": yard.secret("YARD_S3_KEY_ID"),
        "AWS_SECRET_ACCESS_KEY": yard.secret("YARD_S3_SECRET"),
    }
    command = [sys.executable, "deploy/dev/s3check.py", "--make-bucket", "s3://yard"]
    made = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **leading, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return leading
