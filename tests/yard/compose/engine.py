"""The yard of docker-compose.yml on a real engine, under its own name and ports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.yard.container.containers import running_engine
from tests.yard.yard import ROOT

EXPORT = re.compile(r"(\w+)=(\S+)")
FILES = ("docker-compose.yml", "deploy/dev/compose.yml")
REGISTRY = "yard-test"
"""Images of tests, beside those that a person built."""
BUILD_SECONDS = 1500


@contextmanager
def engine() -> Iterator[dict[str, str]]:
    """A running engine: the variables that compose needs to build and run on it."""
    with running_engine() as python_image:
        made = subprocess.run(
            [ROOT / "deploy/dev/base-image.sh"], stdout=subprocess.PIPE, text=True, check=True
        )
        images = dict(EXPORT.findall(made.stdout))
        assert images["PYTHON_IMAGE"] == python_image
        yield {"DOCKER_HOST": os.environ["DOCKER_HOST"], "COMPOSE_BAKE": "false", **images}


def without_yard(variables: Mapping[str, str]) -> dict[str, str]:
    """But for the root of the yard of whoever runs the tests, which .ci/run has: compose reads a
    variable of this name before its .env."""
    return {name: value for name, value in variables.items() if name != "YARD"}


@dataclass
class Compose:
    """One project of docker compose."""

    project: str
    folder: Path
    variables: dict[str, str]

    @property
    def home(self) -> Path:
        """The folder that stages and flows see."""
        return self.folder / "home"

    @property
    def settings(self) -> Path:
        """Its .env."""
        return self.folder / "env"

    def secret(self, name: str) -> str:
        """A value of its .env."""
        lines = self.settings.read_text().splitlines()
        return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}="))

    def write_settings(self, **chosen: str) -> None:
        """Make .env as `make env` does, with some values given."""
        given = {"YARD_HOME": str(self.home), "YARD_NETWORK": self.project} | chosen
        given |= dict.fromkeys(("YARD_UI_PORT", "YARD_BROWSE_PORT", "YARD_S3_PORT"), "0")
        given |= {"TRAINYARD_REGISTRY": REGISTRY}
        self.settings.write_text("".join(f"{key}={value}\n" for key, value in given.items()))
        command = [sys.executable, "deploy/env.py", "--file", str(self.settings)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)

    def run(
        self, *arguments: str, seconds: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGUMENTS` to its end."""
        files = [part for file in FILES for part in ("-f", str(ROOT / file))]
        command = ["docker", "compose", "--progress", "plain", "--env-file", str(self.settings)]
        done = subprocess.run(
            [*command, "--project-name", self.project, *files, *arguments],
            cwd=ROOT,
            env={**without_yard(os.environ), **self.variables},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if check and done.returncode and arguments[0] == "up":  # else nobody ever knows why
            print(self.run("logs", "--tail", "40", check=False).stdout)
        assert not check or done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    def build(self, *services: str) -> float:
        """Build the images of some services; seconds."""
        began = time.monotonic()
        self.run("build", *services, seconds=BUILD_SECONDS)
        return time.monotonic() - began

    def stage(
        self, name: str, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """`docker compose run --rm STAGE ...`"""
        return self.run("run", "--rm", "--no-TTY", name, *arguments, check=check)

    def address(self, service: str, port: int) -> str:
        """Where a port of a service is reached from here."""
        return self.run("port", service, str(port)).stdout.strip()

    def states(self) -> dict[str, str]:
        """Each service and what compose says of its container."""
        lines = self.run("ps", "--all", "--format", "json").stdout.splitlines()
        found = [json.loads(line) for line in lines]
        return {one["Service"]: one["Health"] or f"exit {one['ExitCode']}" for one in found}

    def down(self) -> None:
        """Remove its containers, network and volumes; images stay."""
        self.run("--profile", "*", "down", "--volumes", "--timeout", "3", "--remove-orphans")


@contextmanager
def compose(folder: Path, variables: dict[str, str], **chosen: str) -> Iterator[Compose]:
    """A project with its own .env; nothing runs yet."""
    folder.chmod(0o755)
    project = Compose(f"yard-test-{uuid.uuid4().hex[:6]}", folder, variables)
    project.write_settings(**chosen)
    try:
        yield project
    finally:
        project.down()


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the program `docker` to its end."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


def main(images: list[str]) -> None:
    """Builds images for the tests: `python -m tests.yard.compose.engine IMAGE...`.

    Where that cannot be done it prints why, and the tests skip."""
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            engine() as variables,
            compose(Path(folder), variables) as project,
        ):
            print(f"{' '.join(images)}: {project.build(*images):.0f} s")
    except pytest.skip.Exception as reason:
        print(reason)


if __name__ == "__main__":
    main(sys.argv[1:])
