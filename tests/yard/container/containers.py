"""A real Docker engine, and jobs through the container block."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.backends.container.job import ContainerJob
from flows.backends.container.options import ContainerOptions
from flows.backends.spec import LaunchSpec, Mount
from tests.yard.jobs import follow as follow
from tests.yard.yard import ROOT

EXPORT = re.compile(r"(\w+)=(\S+)")

SECONDS = 60
NOT_HERE = 69
"""Exit status of the scripts in deploy/dev where this machine is not one for it."""

COUNTING = """
import os, signal, time
def stop(number, frame):
    print("stopped by", signal.Signals(number).name, "at", step, flush=True)
    raise SystemExit(128 + number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
with open(os.environ["TRAINYARD_RUN_DIR"] + "/starts", "a") as file:
    file.write("start\\n")
for step in range(STEPS):
    print("step", step, flush=True)
    time.sleep(0.05)
"""

THIS_PYTHON = tuple(
    Mount(source=folder, target=folder)
    for folder in dict.fromkeys((str(ROOT), sys.prefix, sys.base_prefix))
    if Path(folder).exists()
)
"""This checkout and this environment, so that a container without any of ours runs both."""


@contextmanager
def running_engine() -> Iterator[str]:
    """An engine, in DOCKER_HOST; gives the name of an image that has a Python 3.11.

    Brings one up where none answers. It stays: images are slow to make, and
    deploy/dev/engine-down.sh ends it."""
    if shutil.which("docker") is None and os.geteuid() != 0:
        pytest.skip("no docker here, and installing it takes root")
    if os.environ.get("YARD_ENGINE") == "none":
        pytest.skip("no Docker engine here: deploy/dev/engine-up.sh could bring none up before")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", _exported("engine-up.sh").get("DOCKER_HOST", ""))
        yield _exported("base-image.sh")["PYTHON_IMAGE"]


def _exported(script: str) -> dict[str, str]:
    """Run a script; the variables that it prints."""
    made = subprocess.run([ROOT / "deploy/dev" / script], capture_output=True, text=True)
    if made.returncode == NOT_HERE:
        pytest.skip(made.stderr.strip().rpartition("\n")[2])
    assert made.returncode == 0, made.stderr
    return dict(EXPORT.findall(made.stdout))


def docker(*arguments: str) -> str:
    """What the program `docker` prints."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def containers(key: str) -> list[str]:
    """Ids of all containers of a key, running or not."""
    return docker("ps", "-aq", "--no-trunc", "--filter", f"label=trainyard.key={key}").split()


def job(folder: Path, key: str, image: str, code: str, **values: Any) -> ContainerJob:
    """A Python program as a job."""
    block = {
        name: values.pop(name)
        for name in ("hang_seconds", "poll_seconds", "options")
        if name in values
    }
    given = {"name": "job", "command": ("python3", "-c", code), "image": image, **values}
    spec = LaunchSpec(run_directory=str(folder / key), key=key, **given)
    return ContainerJob(spec=spec, **{"options": ContainerOptions(pull="never"), **block})


def counting(steps: int = 10_000) -> str:
    """Twenty steps a second; says by which signal it was stopped."""
    return COUNTING.replace("STEPS", str(steps))


def text_of(block: ContainerJob, name: str = "log.txt") -> str:
    path = Path(block.spec.run_directory, name)
    return path.read_text() if path.exists() else ""


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.05)


def steps_of(block: ContainerJob) -> list[int]:
    lines = text_of(block).splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("step ")]
