"""A real Slurm of two nodes on this machine, and jobs through the block."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.backends.slurm.job import SlurmJob
from flows.backends.slurm.options import SlurmOptions
from flows.backends.spec import LaunchSpec
from tests.yard.yard import ROOT

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "flock")
WAIT_SECONDS = 100
"""So long another program's cluster on this machine is waited for."""
TAKEN = 75
"""What slurm-up.sh ends with while there is one."""

ON_TWO_NODES = """
block = "slurm"
python = "{python}"
run_folder = "{folder}/runs"
{more}

[resources.pretrain]
nodes = 2
processes_per_node = 1
cpus_per_node = 1
{resources}

[environment]
OMP_NUM_THREADS = "1"
GLOO_SOCKET_IFNAME = "{interface}"
PYTHONPATH = "{root}"

{tables}
"""


def profile_on_two_nodes(
    folder: Path,
    more: str = "",
    tables: str = "",
    resources: str = "",
    python: str = sys.executable,
    interface: str = "eth0",
) -> str:
    """The profile of a yard that trains on both nodes, one rank on each.

    more: lines above its tables; tables: further ones; resources: lines of those of the training.
    interface: over which the ranks talk."""
    given = {"folder": folder, "more": more, "tables": tables, "python": python}
    given |= {"resources": resources}
    return ON_TWO_NODES.format(root=ROOT, interface=interface, **given)


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
        """Start what does not run of it; another program's cluster is waited for."""
        environment = {**os.environ, **({} if wait else {"YARD_SLURM_NO_WAIT": "1"})}
        deadline = time.monotonic() + WAIT_SECONDS
        while (status := self._script("slurm-up.sh", environment)) == TAKEN:
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(1)
        assert status == 0, self._output.read_text()
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def down(self) -> None:
        """Stop all of it."""
        subprocess.run([ROOT / "deploy/dev/slurm-down.sh", self.folder, "--purge"], check=True)
        os.environ.pop("SLURM_CONF", None)

    def power_off(self, node: str) -> None:
        """End a node and all that runs on it."""
        subprocess.run([ROOT / "deploy/dev/slurm-power-off.sh", node, self.folder], check=True)

    @contextmanager
    def forgetting(self, seconds: int) -> Iterator[None]:
        """A controller that forgets jobs so long after their end, or a few seconds later."""
        conf = self.folder / "slurm.conf"
        before = conf.read_text()
        self._configure(re.sub(r"(?m)^MinJobAge=.*", f"MinJobAge={seconds}", before))
        try:
            yield
        finally:
            self._configure(before)

    def _configure(self, text: str) -> None:
        (self.folder / "slurm.conf").write_text(text)
        subprocess.run(["scontrol", "reconfigure"], check=True)

    def on_node(self, node: str, *command: str) -> None:
        """Run a program among the mounts of a node."""
        first = (self.folder / "run" / f"{node}.pid").read_text().strip()
        inside = Path(f"/proc/{first}/task/{first}/children").read_text().split()[0]
        subprocess.run(["nsenter", "--mount", f"--target={inside}", *command], check=True)

    @property
    def bounds_memory(self) -> bool:
        """True where jobs get no more memory than they ask for."""
        return (self.folder / "cgroup.conf").exists()

    @property
    def _output(self) -> Path:
        return self.folder.parent / "up.txt"

    def _script(self, name: str, environment: dict[str, str]) -> int:
        command = [ROOT / "deploy/dev" / name, self.folder]
        # To a file: the daemons keep what they inherit open.
        with self._output.open("w") as output_file:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output_file,
                stderr=output_file,
            )
        return done.returncode


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
