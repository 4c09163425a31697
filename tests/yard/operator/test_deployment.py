"""The deployments of prefect.yaml, on a real server with a real worker."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli.flow_commands import RECIPE_FLOWS
from tests.yard.operator.deployed import ENDED, Api, Worker, comes, register, working
from tests.yard.yard import COLLECTED, ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

LONG = COLLECTED.replace("train_iters = 6", "train_iters = 100000\nlog_interval = 10")
STOP_SECONDS = 30
"""From Cancel until nothing of a flow runs, and Prefect says so."""
RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def yard(
    tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str], module_cache: str
) -> Yard:
    folder = tmp_path_factory.mktemp("deployment")
    cache = {"TRAINYARD_CACHE": module_cache, "PREFECT_HOME": str(folder / "home")}
    return Yard(folder, {**prefect_api, **cache})


@pytest.fixture(scope="module")
def worker(yard: Yard) -> Iterator[Worker]:
    """A worker of pool `local`, for which everything in prefect.yaml is registered."""
    register(yard, "local")
    with working(yard, "local") as worker:
        yield worker


@pytest.fixture(scope="module")
def server(prefect_api: dict[str, str]) -> Api:
    return Api(prefect_api["PREFECT_API_URL"])


def begin(yard: Yard, deployment: str, **parameters: str) -> str:
    """Ask for a run of a deployment; its id."""
    given = [f"--param={key}={value}" for key, value in parameters.items()]
    asked = yard.run("-m", "prefect", "deployment", "run", deployment, *given)
    found = RUN_ID.search(asked.out)
    assert found, asked.out + asked.err
    return found[0]


def test_prefect_has_the_stages_of_a_flow(yard: Yard, server: Api, worker: Worker) -> None:
    run = begin(yard, "pretrain-gpt/local", recipe=yard.recipe(COLLECTED))
    assert comes(300, lambda: server.state(run) in ENDED)
    assert server.state(run) == "COMPLETED", worker.output

    stages = {task["name"]: task["state_type"] for task in server.of_run("task_runs", run)}
    assert stages["pretrain"] == stages["tokenize-train-00001"] == "COMPLETED"

    shown = {one["key"]: one["data"] for one in server.of_run("artifacts", run)}
    assert float(shown["pretrain-gpt-progress"]) == 100
    assert "| `pretrain` | done |" in shown["pretrain-gpt-stages"]
    assert "card.html" in shown["pretrain-gpt-card"]

    lines = [line["message"] for line in server.of_run("logs", run)]
    assert any("nothing to do" in line or "iteration" in line for line in lines)


@pytest.mark.usefixtures("worker")
def test_cancelling_in_prefect_stops_the_stage(yard: Yard, server: Api) -> None:
    run = begin(yard, "pretrain-gpt/local", recipe=yard.recipe(LONG))

    def is_training() -> bool:
        return any("stages.pretrain" in program for program in yard.processes())

    assert comes(120, is_training)
    cancelled = yard.run("-m", "prefect", "flow-run", "cancel", run)
    assert cancelled.status == 0, cancelled.err
    assert comes(STOP_SECONDS, lambda: not is_training() and server.state(run) == "CANCELLED")


# --- refusals -------------------------------------------------------------------------------------


def check_told_in_words(server: Api, worker: Worker, run: str, words: str) -> None:
    """A run that failed for what somebody wrote: these words are its state, they come in its log,
    and no traceback stands over them."""
    assert comes(90, lambda: server.state(run) in ENDED), worker.output
    state = server.ask(f"flow_runs/{run}")["state"]
    assert (state["type"], state["message"]) == ("FAILED", words)
    assert server.of_run("task_runs", run) == []

    def log() -> str:
        return "\n".join(line["message"] for line in server.of_run("logs", run))

    assert comes(20, lambda: words in log()), log()
    assert "Traceback" not in log()


@pytest.mark.full
def test_wrong_recipe_is_named(yard: Yard, server: Api, worker: Worker, tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.toml"
    recipe.write_text("[tokenise]\n")
    words = f"{recipe}: unknown table 'tokenise'; did you mean 'tokenize'?"
    flows = ("prepare-corpus", "pretrain-gpt", "release", "corpus-refresh")
    runs = [server.begin(f"{flow}/local", recipe=str(recipe)) for flow in flows]
    one = server.begin("run-stage/local", stage="tokenize")
    swept = server.begin("collect-garbage/local", keep_corpus_versions=0)
    for run in runs:
        check_told_in_words(server, worker, run, words)
    needs = "run-stage needs config, a document of options, or options"
    check_told_in_words(server, worker, one, needs)
    least = "--keep-corpus-versions must be at least 1, got 0"
    check_told_in_words(server, worker, swept, least)
    # None of ours: Prefect's heartbeat has one where a flow ends just when it beats.
    assert f'File "{ROOT}/flows/' not in worker.output


@pytest.mark.full
def test_another_version_is_refused(yard: Yard, server: Api, worker: Worker) -> None:
    (block,) = (one for one in server.ask("block_documents/filter", {}) if one["name"] == "local")
    _patch(server, block, {**block["data"], "version": "0.0.0"})
    run = begin(yard, "run-stage/local", stage="verify", config="none.toml")
    assert comes(60, lambda: server.state(run) in ENDED), worker.output
    _patch(server, block, block["data"])
    state = server.ask(f"flow_runs/{run}")["state"]
    assert state["type"] == "FAILED"
    assert state["message"].startswith("yard local was registered by trainyard 0.0.0")


def _patch(server: Api, block: dict[str, Any], data: dict[str, Any]) -> None:
    asked = {"data": data, "merge_existing_data": False}
    server.ask(f"block_documents/{block['id']}", asked, "PATCH")


def test_every_deployment_names_a_flow_that_exists() -> None:
    code = (
        "import yaml; from prefect.flows import load_flow_from_entrypoint as load;"
        "print(*sorted(load(d['entrypoint']).name + '/' + d['name']"
        " for d in yaml.safe_load(open('prefect.yaml'))['deployments']))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    flows = (*RECIPE_FLOWS, "collect_garbage", "run_stage")
    assert sorted(flow.replace("_", "-") for flow in flows) == [
        name.removesuffix("/local") for name in loaded.stdout.split()
    ]
    assert Path(ROOT, "recipes", "quickstart.toml").exists()
