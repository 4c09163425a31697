"""What the orchestration of a yard costs, beside the stages' own time.

    python -m benchmarks.orchestration line                ten stages without work, through a flow
    python -m benchmarks.orchestration container --image IMAGE
    python -m benchmarks.orchestration resume              needs Slurm's programs, and root
    python -m benchmarks.orchestration compose [--file ...]  needs a Docker engine with all images

`line` starts a Prefect server first and does not count it. `container` talks to the engine that
DOCKER_HOST names; IMAGE has a `python3`. `resume` brings up two nodes of Slurm on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flows.backends.container.job import ContainerJob
from flows.backends.container.options import ContainerOptions
from flows.backends.outcome import Kind
from flows.backends.process import ProcessJob
from flows.backends.spec import LaunchSpec
from flows.cli.run_flow import ENVIRONMENT
from flows.server.ephemeral import EphemeralServer
from trainyard.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
STAGES = 10
ITERATION = re.compile(r"iteration +(\d+)")
WAIT_SECONDS = 180

LINE = """
import asyncio, sys
from prefect import flow
from flows.recipes.stage_job import stage_job
from flows.runner.stage_runner import StageRunner

folder, count = sys.argv[1], int(sys.argv[2])
model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
jobs = [
    stage_job(
        "plan", {**model, "vocab_size": 300, "output_dir": f"{folder}/{n}"}, "here", f"plan-{n}"
    )
    for n in range(count)
]

@flow(name="ten-stages", persist_result=False)
async def ten_stages():
    async with StageRunner("ten-stages", folder) as line:
        await line.expect(jobs)
        for job in jobs:
            await line.run(job)

asyncio.run(ten_stages())
"""


def report(name: str, seconds: Sequence[float]) -> float:
    """Print a figure of several runs; its median."""
    middle = statistics.median(seconds)
    print(f"{name:44s} {middle:6.2f} s ({min(seconds):.2f}-{max(seconds):.2f}, n={len(seconds)})")
    return middle


def program(code: str, *arguments: str, **environment: str) -> float:
    """Seconds of a Python program; RuntimeError when it fails."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return time.perf_counter() - began


def line(folder: Path, runs: int) -> None:
    """Ten stages that do nothing, one after another, against a server that runs; the stages alone.

    All have been made once before, so each finds its manifest and leaves."""
    api = EphemeralServer(folder / "prefect")
    try:
        api.wait()
        here = {**api.environment, "TRAINYARD_CACHE": str(folder / "cache")}
        ten = (LINE, str(folder / "yard"), str(STAGES))
        print(f"made for the first time: {program(*ten, **here):.1f} s")
        flow = report("ten stages through the flow", [program(*ten, **here) for _ in range(runs)])
        one = (LINE, str(folder / "yard"), "1")
        single = report("one stage through the flow", [program(*one, **here) for _ in range(runs)])
        print(f"each further stage: {(flow - single) / (STAGES - 1):.2f} s")
    finally:
        api.stop()
    report("the same ten as bare commands", [_bare(folder) for _ in range(runs)])


def _bare(folder: Path) -> float:
    began = time.perf_counter()
    for number in range(STAGES):
        (document, *_) = sorted(
            (folder / "yard" / ".runs" / f"plan-{number}").glob("*/config.toml")
        )
        command = [sys.executable, "-m", "stages.plan", "--config", str(document)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


# --- containers -----------------------------------------------------------------------------------


def container(folder: Path, runs: int, image: str) -> None:
    """A stage that only says what its options are, as a process and in a container of its image,
    from the block's start of it to its outcome."""

    def spec(number: int, python: str) -> LaunchSpec:
        return LaunchSpec(
            name="plan",
            command=(python, "-m", "stages.plan", "--help"),
            run_directory=str(folder / f"{Path(python).name}-{number}"),
            image=image,
            key=f"bench-{os.getpid()}-{number}",
        )

    options = ContainerOptions(pull="never")
    bare, inside = [], []
    for number in range(runs + 1):
        bare.append(_block_seconds(ProcessJob(spec=spec(number, sys.executable))))
        inside.append(_block_seconds(ContainerJob(spec=spec(number, "python3"), options=options)))
    process = report("a stage that says its options, a process", bare[1:])
    within = report("the same in a container", inside[1:])
    print(f"a container costs {within - process:.2f} s more")


def _block_seconds(block: ProcessJob | ContainerJob) -> float:
    async def whole() -> Kind:
        run = await block.trigger()
        await run.wait_for_completion()
        return (await run.fetch_result()).kind

    began = time.perf_counter()
    if asyncio.run(whole()) is not Kind.DONE:
        raise RuntimeError(f"{block.spec.run_directory}/log.txt says why it failed")
    return time.perf_counter() - began


# --- from a kill to a resumed training ------------------------------------------------------------

TRAIN = """
import asyncio, sys
import numpy as np
from prefect import flow
from flows.recipes.stage_job import stage_job
from flows.backends.spec import Resources
from flows.runner.stage_task import StageEnvironment, run_stage_task
from trainyard.corpus.indexed import IndexedWriter

folder = sys.argv[1]
with open(folder + "/tokens.bin", "wb") as data, open(folder + "/tokens.idx", "wb") as index:
    writer = IndexedWriter(data, np.uint16)
    for start in range(200):
        writer.add_document([((start + np.arange(300) * 3) % 250).astype(np.uint16)])
    writer.write_index(index)
job = stage_job("pretrain", {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 64,
    "micro_batch_size": 2, "global_batch_size": 8, "lr": 1e-3, "train_iters": 100000,
    "eval_iters": 0, "log_interval": 5, "save_interval": 20, "split": "100,0,0",
    "tokenizer_type": "NullTokenizer", "vocab_size": 255, "num_threads": 1,
    "data_path": [folder + "/tokens"], "save": folder + "/save",
}, "here")

@flow(name="kill-to-resume", persist_result=False)
async def train():
    here = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": sys.argv[2]}
    two = Resources(nodes=2)
    await run_stage_task(job, StageEnvironment(
        run_folder=folder + "/runs", block="slurm", environment=here, resources=two))

asyncio.run(train())
"""


def resume(folder: Path, runs: int) -> None:
    """From SIGKILL of all ranks to the first step beyond those made, through Prefect's retry."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with (folder / "slurm.txt").open("w") as log:
        up = [ROOT / "deploy/dev/slurm-up.sh", folder / "slurm"]
        subprocess.run(up, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    environment["SLURM_CONF"] = str(folder / "slurm" / "slurm.conf")
    api = EphemeralServer(folder / "prefect")
    try:
        api.wait()
        environment.update(api.environment)
        seconds = [_resumed(folder / str(number), environment) for number in range(runs)]
        report("from kill to the next step, Slurm", seconds)
    finally:
        api.stop()
        subprocess.run([ROOT / "deploy/dev/slurm-down.sh", folder / "slurm", "--purge"], check=True)


def _resumed(folder: Path, environment: dict[str, str]) -> float:
    """Of a flow of its own: what a task waits before it tries again grows with each time."""
    folder.mkdir()
    program = [sys.executable, "-c", TRAIN, str(folder), str(ROOT)]
    with (
        (folder / "flow.txt").open("w") as log,
        subprocess.Popen(
            program, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        ) as flow,
    ):
        try:
            return _kill(folder)
        finally:
            flow.send_signal(signal.SIGTERM)
            flow.wait(60)


def _kill(folder: Path) -> float:
    """Let it train a while, kill it, and wait until it has got further."""
    _wait(lambda: _furthest(folder) >= 40)
    ranks = _trainings(folder)
    began = time.perf_counter()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):  # its launcher was quicker
            os.kill(pid, signal.SIGKILL)
    reached = _furthest(folder)
    _wait(lambda: _furthest(folder) > reached)
    return time.perf_counter() - began


def _furthest(folder: Path) -> int:
    """The last step in any log."""
    logs = (path.read_text() for path in (folder / "runs").rglob("log.txt"))
    return max((int(step) for log in logs for step in ITERATION.findall(log)), default=0)


def _trainings(folder: Path) -> list[int]:
    """Processes that train for this benchmark."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"stages.pretrain" in command and any(str(folder).encode() in word for word in command):
            found.append(int(place.name))
    return found


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the training did not get any further")
        time.sleep(0.05)


# --- the whole yard -------------------------------------------------------------------------------


def compose(runs: int, files: Sequence[str]) -> None:
    """`docker compose up --wait` of the yard from nothing, its images being there.

    A project of its own: what somebody's yard holds is left alone, but not the ports, so that one
    must be down."""
    project = ["docker", "compose", "--project-name", "yard-bench"]
    project += [f"--file={file}" for file in files]
    environment = {**os.environ, "YARD_NETWORK": "yard-bench"}

    def say(*words: str) -> None:
        subprocess.run([*project, *words], cwd=ROOT, env=environment, check=True)

    seconds = []
    try:
        for _ in range(runs):
            say("down", "--volumes")
            began = time.perf_counter()
            say("up", "-d", "--wait")
            seconds.append(time.perf_counter() - began)
    finally:
        say("down", "--volumes")
    report("docker compose up -d --wait", seconds)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["line", "container", "resume", "compose"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--file", nargs="+", default=["docker-compose.yml"], help="of `compose`")
    parser.add_argument("--image", default=f"trainyard/plan:{VERSION}", help="of `container`")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as scratch:
        folder = Path(scratch)
        if given.what == "container":
            container(folder, given.runs, given.image)
        elif given.what == "compose":
            compose(given.runs, given.file)
        else:
            {"line": line, "resume": resume}[given.what](folder, given.runs)


if __name__ == "__main__":
    main()
