"""Scripts for sbatch and docker run no part of what people wrote in a recipe or profile."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flows.backends.container.options import ContainerOptions
from flows.backends.container.render import Host, docker_run, render_container
from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.script import render_slurm
from flows.backends.spec import LaunchSpec, Mount, Resources
from trainyard.errors import ConfigError

pytestmark = pytest.mark.slow

INJECTIONS = [
    "; touch witness",
    "| touch witness",
    "&& touch witness",
    "& touch witness &",
    "$(touch witness)",
    "$(touch${IFS}witness)",
    "${x:=$(touch witness)}",
    "$((x[$(touch witness)]))",
    "`touch witness`",
    "<(touch witness)",
    "> witness",
    "\ntouch witness\n",
    "\rtouch witness",
    "'; touch witness; '",
    '"; touch witness; "',
    "'\"'; touch witness #",
    "\\'; touch witness; \\'",
    "\\\n; touch witness",
    "$'\\n'touch witness",
    ")\ntouch witness\ncommand=(",
    "EOF\ntouch witness\nEOF",
    "\n#SBATCH --output=witness\n",
    " --wrap=touch",
    ",touch\twitness",
]


class Field(NamedTuple):
    """Where a text goes: of the job, or of the backend's options."""

    job: str = ""
    option: str = ""
    value: Any = "x{}"
    """What the field gets, with the text in the place of {}."""


JOB = {
    "the command": Field("command", value=("true", "{}", "--x={}")),
    "the program": Field("command", value=("./{}",)),
    "a variable": Field("environment", value={"VALUE": "{}"}),
    "the name of a variable": Field("environment", value={"A{}": "1"}),
    "the working directory": Field("working_directory", value="/x{}"),
    "the run folder": Field("run_directory", value="{run}{}"),
    "the image": Field("image"),
    "a mount": Field("mounts", value="/x{}"),
    "the job's name": Field("name"),
    "the key": Field("key"),
    "what starts ranks": Field("rank_launcher", value=("true", "{}")),
}
SLURM = {
    **{name: Field(option=name) for name in ("partition", "account", "qos", "reservation")},
    **{name: Field(option=name) for name in ("constraint", "nodelist", "exclude", "gpu_type")},
    "setup_file": Field(option="setup_file", value="/x{}"),
    "extra": Field(option="extra", value=("--mail-user=x{}",)),
    "containers": Field(option="containers"),
    "requeue": Field(option="requeue"),
}
DOCKER = {
    **{name: Field(option=name) for name in ("network", "user", "shared_memory", "pull")},
    "temporary_size": Field(option="temporary_size", value="1g{}"),
    "inherited_environment": Field(option="inherited_environment", value=("A{}",)),
    "gpus": Field(option="gpus", value=("0{}",)),
    "capabilities": Field(option="capabilities", value=("IPC{}",)),
    "devices": Field(option="devices", value=("/dev/x{}",)),
}


def filled(value: Any, text: str, run: str) -> Any:
    if isinstance(value, str):
        return value.replace("{run}", run).replace("{}", text)
    if isinstance(value, dict):
        return {filled(key, text, run): filled(one, text, run) for key, one in value.items()}
    return tuple(filled(one, text, run) for one in value)


def job_of(field: Field, text: str, run: Path, **given: Any) -> LaunchSpec:
    job: dict[str, Any] = {"name": "merge", "command": ("true",), "key": "7c1f-1", **given}
    job["run_directory"] = str(run)
    if field.job:
        job[field.job] = filled(field.value, text, str(run))
    if field.job == "mounts":
        job["mounts"] = (Mount(source=job["mounts"], target="/y"),)
    return LaunchSpec(**job)


def options_of(field: Field, text: str) -> dict[str, Any]:
    return {field.option: filled(field.value, text, "")} if field.option else {}


SRUN = '#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n'
STANDINS = {"srun": SRUN, "docker": "#!/bin/sh\n", "scontrol": "#!/bin/sh\necho node7\n"}


def check(script: str, folder: Path) -> None:
    """Run it, with stand-ins for the programs of the site: nothing that was injected has run."""
    for name, text in STANDINS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    there = folder / "there"
    there.mkdir(exist_ok=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node7"}
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **job}
    command = ["bash"] if script.startswith("#!/bin/bash") else ["sh"]
    subprocess.run(command, input=script.encode(), env=environment, cwd=there, capture_output=True)
    assert not list(there.iterdir()), script


def sbatch_lines(script: str) -> list[str]:
    """What sbatch reads: comments up to the first command."""
    lines = script.splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    return [line.split("=")[0] for line in lines[:end] if line.startswith("#SBATCH")]


@pytest.mark.parametrize("field", [*JOB.values(), *SLURM.values()], ids=[*JOB, *SLURM])
def test_no_text_runs_in_a_script_for_sbatch(field: Field, tmp_path: Path) -> None:
    has_image = field.job in ("image", "mounts")
    site = {"containers": "apptainer"} if has_image else {}
    needs = {"image": "x"} if field.job == "mounts" else {}
    needs |= {"resources": Resources(nodes=2)} if field.job == "rank_launcher" else {}
    sound = job_of(Field(), "", tmp_path / "run", **needs)
    expected = sbatch_lines(render_slurm(sound, SlurmOptions(**site)))
    for text in INJECTIONS:
        with suppress(ConfigError):
            options = SlurmOptions(**{**site, **options_of(field, text)})
            script = render_slurm(job_of(field, text, tmp_path / "run", **needs), options)
            assert not field.option  # they are all refused
            assert sbatch_lines(script) == expected
            check(script, tmp_path)


@pytest.mark.parametrize("field", [*JOB.values(), *DOCKER.values()], ids=[*JOB, *DOCKER])
def test_no_text_runs_in_a_script_for_docker(field: Field, tmp_path: Path) -> None:
    wanted = Resources(gpus_per_node=int(field.option == "gpus"))
    for text in INJECTIONS:
        needs = {} if field.job == "image" else {"image": "x"}
        with suppress(ConfigError):
            job = job_of(field, text, tmp_path / "run", resources=wanted, **needs)
            options = ContainerOptions(**options_of(field, text))
            script = docker_run(render_container(job, options, Host(user="1:1")))
            assert not field.option
            check(script, tmp_path)
