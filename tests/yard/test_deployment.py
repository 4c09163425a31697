"""The deployments of prefect.yaml, on a real server with a real worker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.yard.deployed import answer_of
from tests.yard.yard import COLLECTED, ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

LONG = COLLECTED.replace("train_iters = 6", "train_iters = 100000\nlog_interval = 10")
RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def yard(
    tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str], module_cache: str
) -> Yard:
    folder = tmp_path_factory.mktemp("deployment")
    cache = {"TRAINYARD_CACHE": module_cache, "PREFECT_HOME": str(folder / "home")}
    return Yard(folder, {**prefect_api, **cache})


@pytest.fixture(scope="module")
def worker(yard: Yard) -> Iterator[subprocess.Popen[str]]:
    """A worker of pool `local`, for which everything in prefect.yaml is registered."""
    done = yard.run("-m", "flows.register", "--yard", "local")
    assert done.status == 0, done.out + done.err
    with (
        (yard.folder / "worker.txt").open("w") as said,
        yard.start("-m", "prefect", "worker", "start", "--pool", "local", stderr=said) as process,
    ):
        yield process
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(api: dict[str, str], path: str, body: dict[str, Any] | None = None) -> Any:
    """An answer of Prefect's API."""
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{api['PREFECT_API_URL']}/{path}", data, head)
    return json.loads(answer_of(request))


def begin(yard: Yard, deployment: str, **parameters: str) -> str:
    """Ask for a run of a deployment; its id."""
    given = [f"--param={key}={value}" for key, value in parameters.items()]
    asked = yard.run("-m", "prefect", "deployment", "run", deployment, *given)
    found = RUN_ID.search(asked.out)
    assert found, asked.out + asked.err
    return found[0]


def wait_for(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)
    return condition()


@pytest.mark.usefixtures("worker")
def test_a_deployed_flow_runs_and_prefect_knows_its_stages(
    yard: Yard, prefect_api: dict[str, str]
) -> None:
    run = begin(yard, "pretrain-gpt/local", recipe=yard.recipe(COLLECTED))

    def state() -> str:
        return str(ask(prefect_api, f"flow_runs/{run}")["state_type"])

    assert wait_for(120, lambda: state() in ("COMPLETED", "FAILED", "CRASHED"))
    assert state() == "COMPLETED", (yard.folder / "worker.txt").read_text()

    mine = {"flow_runs": {"id": {"any_": [run]}}}
    stages = {task["name"]: task["state_type"] for task in _filter(prefect_api, "task_runs", mine)}
    assert stages["pretrain"] == stages["tokenize-train-00001"] == "COMPLETED"

    shown = {one["key"]: one["data"] for one in _filter(prefect_api, "artifacts", mine)}
    assert float(shown["pretrain-gpt-progress"]) == 100
    assert "| `pretrain` | done |" in shown["pretrain-gpt-stages"]
    assert "card.html" in shown["pretrain-gpt-card"]

    logs = {"logs": {"flow_run_id": {"any_": [run]}}}
    lines = [line["message"] for line in _filter(prefect_api, "logs", logs)]
    assert any("nothing to do" in line or "iteration" in line for line in lines)


def _filter(api: dict[str, str], kind: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(api, f"{kind}/filter", body)
    return found


@pytest.mark.usefixtures("worker")
def test_cancelling_in_prefect_stops_the_stage(yard: Yard, prefect_api: dict[str, str]) -> None:
    run = begin(yard, "pretrain-gpt/local", recipe=yard.recipe(LONG))

    def is_training() -> bool:
        return any("stages.pretrain" in program for program in yard.processes())

    assert wait_for(120, is_training)
    cancelled = yard.run("-m", "prefect", "flow-run", "cancel", run)
    assert cancelled.status == 0, cancelled.err
    assert wait_for(30, lambda: not is_training())
    assert wait_for(30, lambda: ask(prefect_api, f"flow_runs/{run}")["state_type"] == "CANCELLED")


@pytest.mark.usefixtures("worker")
def test_a_deployment_of_another_version_is_refused(
    yard: Yard, prefect_api: dict[str, str]
) -> None:
    found = _filter(prefect_api, "block_documents", {})
    (block,) = (one for one in found if one["name"] == "local")
    _patch_block(prefect_api, block, {**block["data"], "version": "0.0.0"})
    run = begin(yard, "run-stage/local", stage="verify", config="none.toml")

    def ended() -> bool:
        state = ask(prefect_api, f"flow_runs/{run}")["state_type"]
        return state in ("COMPLETED", "FAILED", "CRASHED")

    assert wait_for(60, ended)
    _patch_block(prefect_api, block, block["data"])
    state = ask(prefect_api, f"flow_runs/{run}")["state"]
    assert state["type"] == "FAILED"
    assert "was registered by trainyard 0.0.0" in state["message"]


def _patch_block(api: dict[str, str], block: dict[str, Any], data: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{api['PREFECT_API_URL']}/block_documents/{block['id']}",
        json.dumps({"data": data, "merge_existing_data": False}).encode(),
        {"Content-Type": "application/json"},
        method="PATCH",
    )
    answer_of(request)


def test_every_deployment_names_a_flow_that_exists() -> None:
    code = (
        "import yaml; from prefect.flows import load_flow_from_entrypoint as load;"
        "print(*sorted(load(d['entrypoint']).name + '/' + d['name']"
        " for d in yaml.safe_load(open('prefect.yaml'))['deployments']))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    flows = ["collect-garbage", "corpus-refresh", "prepare-corpus", "pretrain-gpt"]
    assert [*flows, "release", "run-stage"] == [
        name.removesuffix("/local") for name in loaded.stdout.split()
    ]
    assert Path(ROOT, "recipes", "quickstart.toml").exists()
