"""Runs that a server starts again by itself, as their worker is gone; and those that wait."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.yard.faults.faults import steps, training
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.kube import profile_on_pods
from tests.yard.operator.deployed import ENDED, WholeServer, comes, pids, register, working
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

GONE = "Nothing was heard of this run for 60 s: its worker is gone."
SETTLED_SECONDS = 6
"""Long enough for an automation of the server to act, had it anything to do."""


def yard_of(folder: Path, server: WholeServer, profile: str) -> Yard:
    """A yard `site` with this profile, registered."""
    yard = Yard(folder, {**server.environment, "TRAINYARD_CACHE": str(folder / "cache")})
    path = folder / "site.toml"
    path.write_text(f'deployments = ["run-stage"]\n{profile}')
    register(yard, str(path))
    return yard


def put(server: WholeServer, run: str, kind: str, message: str = "") -> None:
    """Set a state as a worker or a flow does."""
    state = {"state": {"type": kind, "message": message}, "force": False}
    done = server.ask(f"flow_runs/{run}/set_state", state)
    assert done["status"] == "ACCEPT", done


def history(server: WholeServer, run: str) -> list[str]:
    """The names of all states that a run was in, in order."""
    found: list[dict[str, Any]] = server.ask(f"flow_run_states/?flow_run_id={run}")
    return [one["name"] for one in sorted(found, key=lambda one: str(one["timestamp"]))]


def stays(server: WholeServer, run: str, kind: str) -> bool:
    """Whether a run is in a state, and nothing changes that."""
    return not comes(SETTLED_SECONDS, lambda: server.state(run) != kind)


@pytest.mark.full
def test_a_crashed_run_restarts_only_up_to_the_limit(tmp_path: Path, server: WholeServer) -> None:
    yard_of(tmp_path, server, "[automations]\nresume_crashed = 2\n")
    run = server.begin("run-stage/site", stage="merge")
    put(server, run, "PENDING")
    put(server, run, "CRASHED", GONE)
    assert stays(server, run, "CRASHED")  # it never ran: that is no worker which died in the night
    server.press_retry(run)
    for _ in range(2):
        put(server, run, "PENDING")
        put(server, run, "RUNNING")
        put(server, run, "CRASHED", GONE)
        assert comes(30, lambda: server.state(run) == "SCHEDULED")
    state = server.ask(f"flow_runs/{run}")["state"]
    assert (state["name"], "2 times at most" in state["message"]) == ("AwaitingRetry", True)

    put(server, run, "PENDING")
    put(server, run, "CRASHED", GONE)  # before it ran again: the same count, which has fired
    assert stays(server, run, "CRASHED")
    server.press_retry(run)
    put(server, run, "PENDING")
    put(server, run, "RUNNING")
    put(server, run, "CRASHED", GONE)
    assert stays(server, run, "CRASHED")


@pytest.mark.full
def test_failed_and_cancelled_runs_wait_for_a_person(tmp_path: Path, server: WholeServer) -> None:
    yard_of(tmp_path, server, "")
    ends = {"CRASHED": "exited with non-zero status code 1", "FAILED": GONE, "CANCELLED": GONE}
    runs = {kind: server.begin("run-stage/site", stage="merge") for kind in ends}
    for kind, run in runs.items():
        put(server, run, "PENDING")
        put(server, run, "RUNNING")
        put(server, run, kind, ends[kind])
    time.sleep(SETTLED_SECONDS)
    assert {kind: server.state(run) for kind, run in runs.items()} == {kind: kind for kind in ends}


@pytest.mark.full
def test_sigterm_is_resumed_and_cancellation_is_not(tmp_path: Path, server: WholeServer) -> None:
    """SIGTERM to a flow, as from a machine that shuts down; and Prefect's own way to cancel."""
    yard = yard_of(tmp_path, server, "")
    save = tmp_path / "save"
    document = training(tmp_path, str(save), 100_000, save_interval=50)
    with working(yard, "site") as worker:
        run = server.begin("run-stage/site", stage="pretrain", config=document)
        assert comes(90, lambda: steps(save)), worker.output
        flow = int(server.ask(f"flow_runs/{run}")["infrastructure_pid"].rpartition(":")[2])
        os.kill(flow, signal.SIGTERM)
        assert comes(60, lambda: "AwaitingRetry" in history(server, run)), worker.output
        reached = steps(save)[-1]
        assert comes(90, lambda: steps(save)[-1] > reached), worker.output
        assert "Crashed" in history(server, run)

        server.cancel(run)
        assert comes(60, lambda: server.state(run) == "CANCELLED"), worker.output
        assert stays(server, run, "CANCELLED")
        assert not pids(f"stages.pretrain --config {tmp_path}")
        assert server.ask(f"flow_runs/{run}")["run_count"] == 2


# --- a machine that is gone -----------------------------------------------------------------------

STEPS = 4000
"""So many that pods still train when the run has been missed for a minute and taken up again."""


REPLACED = ("flows.worker", "--leave-jobs")
"""The worker of deploy/kubernetes/worker.yaml, which gets SIGTERM when its pod is replaced."""


@pytest.mark.full
@pytest.mark.parametrize(
    "program", [("prefect", "worker", "start"), REPLACED], ids=["power lost", "pod replaced"]
)
def test_another_worker_resumes_the_run_of_a_dead_machine(
    tmp_path: Path, server: WholeServer, fake: FakeKube, program: tuple[str, ...]
) -> None:
    """Worker and flow are killed for good in the middle of a training in pods, and another worker
    of the pool is there: nobody presses anything, there is one job, and no step is made twice."""
    profile = profile_on_pods(fake, tmp_path) + "[automations]\nzombie_seconds = 60\n"
    yard = yard_of(tmp_path, server, profile)
    save = tmp_path / "save"
    document = training(tmp_path, str(save), STEPS, save_interval=200)
    with working(yard, "site", "first", program=program) as first:
        run = server.begin("run-stage/site", stage="pretrain", config=document)
        assert comes(90, lambda: steps(save)), first.output
        if program is REPLACED:
            first.process.terminate()
            assert first.process.wait(10) == 0
        else:
            first.power_off()
    killed = time.monotonic()
    with working(yard, "site", "second") as second:
        assert comes(180, lambda: "AwaitingRetry" in history(server, run)), second.output
        missed = time.monotonic() - killed
        assert comes(300, lambda: server.state(run) in ENDED), second.output
    assert server.state(run) == "COMPLETED", second.output
    assert missed > 25  # heard at most 30 s before, silent for 60
    names = history(server, run)
    assert names.index("Crashed") < names.index("AwaitingRetry") < names.index("Completed")
    (folder,) = (tmp_path / "runs" / "yard" / "pretrain").iterdir()
    events = (folder / "events.jsonl").read_text()
    assert events.count('"submitted"') == 1
    assert '"reattached"' in events
    made = [json.loads(line).get("step") for line in (save / "ledger.jsonl").open()]
    trained = [step for step in made if step]
    assert trained == sorted(set(trained))
    assert steps(save)[-1] == STEPS


@pytest.mark.full
def test_a_run_cancelled_without_worker_is_not_resumed(tmp_path: Path, server: WholeServer) -> None:
    yard = yard_of(tmp_path, server, "[automations]\nzombie_seconds = 60\n")
    save = tmp_path / "save"
    document = training(tmp_path, str(save), 100_000, save_interval=50)
    with working(yard, "site") as worker:
        run = server.begin("run-stage/site", stage="pretrain", config=document)
        assert comes(90, lambda: steps(save)), worker.output
        worker.power_off()
    server.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    assert comes(150, lambda: server.state(run) in ENDED)
    assert server.state(run) == "CANCELLED"
    assert stays(server, run, "CANCELLED")
    assert "Crashed" not in history(server, run)
