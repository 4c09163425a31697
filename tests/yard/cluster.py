"""A real Slurm of two nodes on this machine, and jobs through the block."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.blocks.slurm import SlurmJob, SlurmJobRun
from flows.launch.outcome import Outcome
from flows.launch.slurm_options import SlurmOptions
from flows.launch.spec import LaunchSpec
from tests.yard.yard import ROOT

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def why_not() -> str:
    """Why no cluster can be brought up here; empty when one can."""
    if os.geteuid() != 0:
        return "a cluster on one machine takes root, for its nodes' namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge iproute2"
    return ""


@dataclass
class Cluster:
    """The cluster of a test session."""

    folder: Path

    def up(self, wait: bool = True) -> None:
        """Start what does not run of it."""
        environment = {**os.environ, **({} if wait else {"YARD_SLURM_NO_WAIT": "1"})}
        self._script("slurm-up.sh", environment)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def down(self) -> None:
        """Stop all of it."""
        subprocess.run([ROOT / "deploy/dev/slurm-down.sh", self.folder, "--purge"], check=True)
        os.environ.pop("SLURM_CONF", None)

    def power_off(self, node: str) -> None:
        """End a node and all that runs on it."""
        subprocess.run([ROOT / "deploy/dev/slurm-power-off.sh", node, self.folder], check=True)

    def _script(self, name: str, environment: dict[str, str]) -> None:
        command = [ROOT / "deploy/dev" / name, self.folder]
        # To a file: the daemons keep what they inherit open.
        with (self.folder.parent / "up.txt").open("w") as said:
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                check=True,
            )


def ask(*command: str) -> str:
    """What a program of Slurm prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def job(folder: Path, key: str, code: str, **values: Any) -> SlurmJob:
    """A Python program as a job."""
    block = {name: values.pop(name) for name in ("hang_seconds",) if name in values}
    options = values.pop("options", SlurmOptions())
    given = {"name": "job", "command": (sys.executable, "-c", code), "key": key, **values}
    spec = LaunchSpec(run_directory=str(folder / key), working_directory=str(ROOT), **given)
    return SlurmJob(spec=spec, options=options, poll_seconds=1.0, **block)


def follow(
    block: SlurmJob, meanwhile: Callable[[SlurmJobRun], Coroutine[None, None, None]] | None = None
) -> tuple[SlurmJobRun, Outcome]:
    """Trigger, wait, and fetch; `meanwhile` happens beside the waiting."""

    async def whole() -> tuple[SlurmJobRun, Outcome]:
        run = await block.trigger()
        async with asyncio.TaskGroup() as group:
            group.create_task(run.wait_for_completion())
            if meanwhile is not None:
                group.create_task(meanwhile(run))
        return run, await run.fetch_result()

    return asyncio.run(whole())
