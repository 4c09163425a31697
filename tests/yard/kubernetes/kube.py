"""Jobs through the Kubernetes block, on the stand-in for a cluster."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from flows.backends.kubernetes.job import KubernetesJob, KubernetesJobRun
from flows.backends.kubernetes.options import Claim, KubernetesOptions
from flows.backends.outcome import Outcome
from flows.backends.spec import LaunchSpec, Resources
from tests.yard import jobs
from tests.yard.jobs import ALL_REDUCE as ALL_REDUCE
from tests.yard.jobs import TORCHRUN
from tests.yard.jobs import wait_until as wait_until
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.yard import ROOT

NETWORK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def site(fake: FakeKube, folder: Path, **options: Any) -> KubernetesOptions:
    """The stand-in's one namespace, where a claim is a folder of this machine."""
    claims = (Claim(name="yard", target=str(folder)),)
    given = {"namespace": "yard", "kubeconfig": str(fake.kubeconfig), "claims": claims}
    return KubernetesOptions(**{**given, **options})


ON_PODS = """
block = "kubernetes"
store = "{folder}"
run_folder = "{folder}/runs"
image = "yard/{{stage}}:{{version}}"
python = "{python}"

[kubernetes]
namespace = "yard"
kubeconfig = "{kubeconfig}"
claims = [{{ name = "yard", target = "{folder}" }}]

[environment]
GLOO_SOCKET_IFNAME = "lo"
OMP_NUM_THREADS = "1"
PYTHONPATH = "{root}"
"""


def profile_on_pods(fake: FakeKube, folder: Path, python: str = sys.executable) -> str:
    """The profile of a yard on the stand-in, all of whose files lie in a folder."""
    return profile_through(fake.kubeconfig, folder, python)


def profile_through(kubeconfig: Path, folder: Path, python: str = sys.executable) -> str:
    """The same, on whatever server a kubeconfig leads to."""
    given = {"folder": folder, "python": python, "root": ROOT}
    return ON_PODS.format(kubeconfig=kubeconfig, **given)


def job(fake: FakeKube, folder: Path, key: str, code: str, **values: Any) -> KubernetesJob:
    """A Python program as a job."""
    block = {name: values.pop(name) for name in ("hang_seconds",) if name in values}
    options = values.pop("options", site(fake, folder))
    given = {"name": "job", "command": (sys.executable, "-c", code), "key": key}
    given |= {"image": "yard/cpu:1", "grace_seconds": 5.0, **values}
    spec = LaunchSpec(run_directory=str(folder / key), working_directory=str(ROOT), **given)
    return KubernetesJob(spec=spec, options=options, **block)


def follow(
    block: KubernetesJob,
    meanwhile: Callable[[KubernetesJobRun], Coroutine[None, None, None]] | None = None,
) -> Outcome:
    """Trigger, wait, and fetch; `meanwhile` runs during the wait."""

    return jobs.follow(block, meanwhile)[1]


def log_of(block: KubernetesJob) -> Path:
    return Path(block.spec.run_directory, "log.txt")


def says(block: KubernetesJob, text: str, times: int = 1) -> Callable[[], bool]:
    """Whether the log has a text at least so often."""
    log = log_of(block)
    return lambda: log.exists() and log.read_text().count(text) >= times


TWO_NODES: dict[str, Any] = {
    "resources": Resources(nodes=2),
    "rank_launcher": TORCHRUN,
    "environment": NETWORK,
}


def training(steps: int = 10_000) -> str:
    """Counts ten steps a second; saves at SIGTERM and SIGUSR1."""
    return jobs.training(steps, 0.1)


def saves(block: KubernetesJob) -> int:
    """Ranks that saved; torchrun's report of a failed one repeats its program."""
    return len(re.findall(r"^(?:\d: )?saved step \d", log_of(block).read_text(), re.MULTILINE))


Meanwhile = Callable[[KubernetesJobRun], Any]


def when(ready: Callable[[], bool], act: Callable[[], object]) -> Meanwhile:
    """Do something when something has come."""

    async def meanwhile(run: KubernetesJobRun) -> None:
        await asyncio.to_thread(wait_until, ready)
        await asyncio.to_thread(act)

    return meanwhile
