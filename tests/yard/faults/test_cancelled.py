"""A flow run that is cancelled in Prefect stops, with or without a worker."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.yard.faults.faults import Server, in_training, steps, training, wait_for
from tests.yard.operator.deployed import Api, comes, register, working
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(400)]

LONG = 100_000
AWAY = "does not answer; trying again until it does"


def cancel(server: Server, run: str, state: str = "CANCELLING") -> None:
    """What the button of the run's page sends."""
    Api(server.url).ask(f"flow_runs/{run}/set_state", {"state": {"type": state}})


def is_training(yard: Yard) -> bool:
    return any("stages.pretrain" in program for program in yard.processes())


@pytest.mark.parametrize("state", ["CANCELLING", pytest.param("CANCELLED", marks=pytest.mark.full)])
def test_flow_without_worker_stops(tmp_path: Path, mortal: Server, yard: Yard, state: str) -> None:
    flow, api = in_training(yard, tmp_path / "save", LONG), Api(mortal.url)
    (run,) = api.ask("flow_runs/filter", {})
    cancel(mortal, run["id"], state)
    ended = flow.ends(30)
    assert ended.status == 128 + signal.SIGTERM, ended.output
    assert ended.states("pretrain") == ["runs", "stopped"]
    assert "cancelled in Prefect; pretrain saved step " in ended.output
    assert "Traceback" not in ended.output
    assert api.state(run["id"]) == "CANCELLED"
    assert not is_training(yard)


@pytest.mark.full
def test_run_is_cancelled_after_a_server_outage(tmp_path: Path, mortal: Server, yard: Yard) -> None:
    yard.environment["PREFECT_CLIENT_MAX_RETRIES"] = "1"  # it gives up sooner
    register(yard, "local")
    save, api = tmp_path / "save", Api(mortal.url)
    document = training(tmp_path, str(save), LONG)
    with working(yard, "local", "ours", "--type", "process", program=["flows.worker"]) as worker:
        run = api.begin("run-stage/local", stage="pretrain", config=document)
        wait_for(lambda: steps(save))
        mortal.kill()
        assert comes(180, lambda: AWAY in worker.output), worker.output[-4000:]
        time.sleep(40)
        mortal.start()
        assert comes(60, lambda: "answers again after" in worker.output), worker.output[-4000:]
        assert worker.output.count(AWAY) == 1
        assert "Traceback" not in worker.output
        assert is_training(yard)
        cancel(mortal, run)
        assert comes(30, lambda: not is_training(yard)), worker.output[-4000:]
        assert comes(15, lambda: api.state(run) == "CANCELLED"), api.state(run)
        # It is not taken for a crashed run and started again.
        assert not comes(10, lambda: api.state(run) != "CANCELLED")
