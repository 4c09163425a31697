"""Faults of half a minute that a flow survives: store, server, database, worker, cancellation."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.server.ephemeral import LEASE_SECONDS, EphemeralServer
from tests.yard.container.containers import THIS_PYTHON, docker, running_engine
from tests.yard.faults.faults import (
    PASSWORD,
    Server,
    in_training,
    logs,
    start_stage,
    steps,
    training,
    wait_for,
)
from tests.yard.faults.wire import Wire
from tests.yard.limited import LIMIT, limit_training
from tests.yard.operator.deployed import Api
from tests.yard.yard import ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(600)]

AWAY_SECONDS = 30
STOP_SECONDS = 30
DAY = 86_400

ITERATION = re.compile(r"iteration +(\d+)")


# --- what a run leans on is away for half a minute ------------------------------------------------


def test_server_absent_for_half_a_minute(tmp_path: Path, mortal: Server, yard: Yard) -> None:
    save = tmp_path / "save"
    flow = in_training(yard, save, 150)
    mortal.kill()
    time.sleep(AWAY_SECONDS)
    mortal.start()
    ended = flow.ends(180)
    assert ended.status == 0, ended.output
    assert ended.states("pretrain") == ["runs", "done"]


def test_database_locked_for_half_a_minute(tmp_path: Path, mortal: Server, yard: Yard) -> None:
    save = tmp_path / "save"
    flow = in_training(yard, save, 400)
    (file,) = (tmp_path / "home").glob("*.db")
    with sqlite3.connect(file, timeout=60, isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(AWAY_SECONDS)
        database.execute("COMMIT")
    ended = flow.ends(180)
    assert ended.status == 0, ended.output
    assert ended.states("pretrain") == ["runs", "done"]


def test_absent_store_is_awaited(tmp_path: Path, yard: Yard, s3_settings: dict[str, str]) -> None:
    wire = Wire(s3_settings["AWS_ENDPOINT_URL"].replace("http://", "tcp://"))
    yard.environment |= {**s3_settings, "AWS_ENDPOINT_URL": f"http://{wire.address}"}
    save = f"s3://yard-tests/{tmp_path.name}-{os.getpid()}"
    flow = start_stage(yard, "pretrain", training(tmp_path, save, 200, save_interval=50))
    wait_for(lambda: re.search(r"iteration +10", logs(tmp_path)))
    wire.cut()
    time.sleep(AWAY_SECONDS)
    wait_for(lambda: "does not answer; waiting" in logs(tmp_path))
    wire.mend()
    ended = flow.ends(300)
    assert ended.status == 0, ended.output
    assert ended.states("pretrain") == ["runs", "done"]
    log = logs(tmp_path)
    assert log.count("does not answer; waiting up to 60 s for it") == 1
    assert log.count("answers again after") == 1
    assert re.search(r"iteration +200", log)


# --- who runs it is killed ------------------------------------------------------------------------


def test_killed_flow_ends_its_stage_and_the_next_resumes(tmp_path: Path, yard: Yard) -> None:
    save = tmp_path / "save"
    flow = in_training(yard, save, 1000)
    flow.kill()
    assert yard.wait_until_empty(30) == []
    reached, before = steps(save)[-1], set(tmp_path.rglob("log.txt"))
    assert reached < 1000
    ended = start_stage(yard, "pretrain", training(tmp_path, str(save), 1000)).ends(180)
    assert ended.status == 0, ended.output
    (log,) = set(tmp_path.rglob("log.txt")) - before
    made = [int(step) for step in ITERATION.findall(log.read_text())]
    assert reached < made[0] <= reached + 10
    assert made[-1] == 1000


def test_slot_of_a_flow_killed_with_its_server_lasts_one_lease(tmp_path: Path) -> None:
    yard = Yard(tmp_path, {"TRAINYARD_CACHE": str(tmp_path / "cache")})
    own = EphemeralServer(tmp_path / "yard" / ".prefect", password=PASSWORD)
    try:
        own.wait()
        limit_training(own.url)
    finally:
        own.stop()
    save = tmp_path / "save"
    flow = in_training(yard, save, 1000)
    (server,) = [pid for pid, line in yard.by_process().items() if "flows.server.ephemeral" in line]
    os.kill(server, signal.SIGKILL)
    flow.kill()
    assert yard.wait_until_empty(30) == []
    ended = start_stage(yard, "pretrain", training(tmp_path, str(save), 1000)).ends(240)
    assert ended.status == 0, ended.output
    began = [
        text for text in ended.output.splitlines() if re.search(r"pretrain +(waits|runs)", text)
    ]
    assert len(began) == 2
    assert f"1 of 1 slots of {LIMIT} in use, by pretrain of flow run pretrain" in began[0]
    waited = seconds_of(began[1]) - seconds_of(began[0])
    assert 0 < waited % DAY < LEASE_SECONDS + 15
    assert steps(save)[-1] == 1000


def seconds_of(line: str) -> int:
    """The time of day in front of a line."""
    hours, minutes, seconds = (int(part) for part in line.split()[0].split(":"))
    return (hours * 60 + minutes) * 60 + seconds


@pytest.fixture
def worker(yard: Yard) -> Iterator[subprocess.Popen[str]]:
    """A worker of pool `local`, and the deployment of one stage."""
    pool = ("work-pool", "create", "local", "--type", "process")
    deploy = ("deploy", "flows/run_stage.py:run_stage", "--name", "faults", "--pool", "local")
    for command in (pool, deploy):
        done = yard.run("-m", "prefect", "--no-prompt", *command)
        assert done.status == 0, done.out + done.err
    process = start_worker(yard)
    yield process
    process.kill()
    process.communicate()


def start_worker(yard: Yard) -> subprocess.Popen[str]:
    with (yard.folder / "worker.txt").open("a") as output_file:
        return yard.start("-m", "prefect", "worker", "start", "--pool", "local", stderr=output_file)


def trainings(yard: Yard) -> int:
    """Trainings of this yard that run now."""
    return sum("stages.pretrain" in program for program in yard.processes())


def test_a_killed_worker_stops_no_job_and_the_next_one_follows_it(
    tmp_path: Path, mortal: Server, yard: Yard, worker: subprocess.Popen[str]
) -> None:
    save = tmp_path / "save"
    server = Api(mortal.url)
    document = training(tmp_path, str(save), 1000)
    run = server.begin("run-stage/faults", stage="pretrain", config=document)
    wait_for(lambda: steps(save))
    os.kill(worker.pid, signal.SIGKILL)
    second, most = start_worker(yard), 0
    try:
        deadline = time.monotonic() + 180
        while server.state(run) == "RUNNING" and time.monotonic() < deadline:
            most = max(most, trainings(yard))
            time.sleep(0.5)
        assert server.state(run) == "COMPLETED"
    finally:
        second.kill()
        second.communicate()
    assert most == 1
    assert steps(save)[-1] == 1000
    assert len(set(tmp_path.rglob("log.txt"))) == 1


# --- a flow that is cancelled ---------------------------------------------------------------------

IN_A_CONTAINER = """
import os
from prefect import flow
from flows.recipes.stage_job import read_job
from flows.backends.container.options import ContainerOptions
from flows.backends.spec import Mount
from flows.runner.stage_task import StageEnvironment, run_stage_task

@flow(name="in-a-container")
async def in_a_container(document: str, folder: str, image: str, mounted: list[str]):
    mounts = [Mount(source=path, target=path) for path in mounted]
    place = StageEnvironment(
        run_folder=folder + "/runs",
        backend="container",
        image=image,
        mounts=(*mounts, Mount(source=folder, target=folder, read_only=False)),
        container=ContainerOptions(pull="never"),
        environment={"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"},
    )
    await run_stage_task(read_job("pretrain", document), place)

if __name__ == "__main__":
    in_a_container.serve(name="faults")
"""


def test_cancelled_flow_stops_its_container(tmp_path: Path, mortal: Server, yard: Yard) -> None:
    save = tmp_path / "save"
    script = tmp_path / "served.py"
    script.write_text(IN_A_CONTAINER)
    yard.environment["PYTHONPATH"] = str(ROOT)
    with running_engine() as image, (tmp_path / "served.txt").open("w") as output_file:
        yard.environment["DOCKER_HOST"] = os.environ["DOCKER_HOST"]
        serving = yard.start(str(script), stderr=output_file)
        try:
            document = training(tmp_path, str(save), 100_000)
            parameters = {
                "document": document,
                "folder": str(tmp_path),
                "image": image,
                "mounted": [mount.source for mount in THIS_PYTHON],
            }
            server = Api(mortal.url)
            wait_for(lambda: server.deployments())
            run = server.begin("in-a-container/faults", **parameters)
            wait_for(lambda: steps(save), 120)
            (name,) = docker("ps", "-q", "--filter", f"volume={tmp_path}").split()
            yard.run("-m", "prefect", "flow-run", "cancel", run)
            signalled_at = time.monotonic()
            wait_for(lambda: not docker("ps", "-aq", "--filter", f"id={name}"), STOP_SECONDS)
            left = STOP_SECONDS - (time.monotonic() - signalled_at)
            wait_for(lambda: server.state(run) == "CANCELLED", left)
            assert "asked to stop" in logs(tmp_path), "it did not save when it was stopped"
        finally:
            serving.kill()
            serving.communicate()
