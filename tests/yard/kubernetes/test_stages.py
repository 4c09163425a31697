"""Stages as jobs of a stand-in for Kubernetes, started by the task of a flow that may be killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows.backends.outcome import Kind, StageError
from flows.backends.run_folder import job_key
from flows.backends.spec import Resources
from flows.recipes.stage_job import stage_job
from flows.recipes.summary import Summary
from flows.runner.stage_task import run_stage_task
from flows.yard.profile import StageEnvironment
from tests.yard.jobs import FLOW_RUN, MODEL, TRAINING, write_tokens
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.kube import NETWORK, site
from tests.yard.yard import ROOT

pytestmark = [pytest.mark.yard, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def at_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a checkout need not be installed
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)


def kube(fake: FakeKube, folder: Path, **values: Any) -> StageEnvironment:
    two = Resources(nodes=2, processes_per_node=1)
    given = {"run_folder": str(folder / "runs"), "image": "yard/cpu:1", "environment": NETWORK}
    return StageEnvironment(
        **{**given, **values},
        backend="kubernetes",
        kubernetes=site(fake, folder),
        resources_by_stage={"pretrain": two},
    )


def run(stage: str, document: dict[str, Any], place: StageEnvironment) -> Summary:
    with disable_run_logger():
        return asyncio.run(run_stage_task.fn(stage_job(stage, document, "test"), place))


def test_a_stage_makes_the_same_in_pods_and_is_reused(fake: FakeKube, tmp_path: Path) -> None:
    def document(name: str) -> dict[str, Any]:
        return {**MODEL, "vocab_size": 300, "output_dir": str(tmp_path / name)}

    first = run("plan", document("pods"), kube(fake, tmp_path))
    here = run("plan", document("here"), StageEnvironment(run_folder=str(tmp_path / "there")))
    assert not first.reused
    assert first.output_digest == here.output_digest
    assert run("plan", document("pods"), kube(fake, tmp_path)).reused
    attempts = tmp_path / "runs" / "plan"
    keys = {job_key(FLOW_RUN, str(attempts), count) for count in (1, 2)}
    assert keys <= {path.name for path in attempts.iterdir()}


def test_the_message_of_a_wrong_option_reaches_the_outcome(fake: FakeKube, tmp_path: Path) -> None:
    document = {**MODEL, "vocab_size": 300, "output_dir": str(tmp_path / "plan")}
    passed = stage_job("plan", document, "test")
    wrong = replace(passed, document={**document, "hidden_size": 31})  # past the first validation
    with disable_run_logger(), pytest.raises(StageError, match="hidden-size") as caught:
        asyncio.run(run_stage_task.fn(wrong, kube(fake, tmp_path)))
    assert caught.value.outcome.kind is Kind.CONFIG


def test_twenty_steps_of_training_on_two_nodes(fake: FakeKube, tmp_path: Path) -> None:
    document = {**TRAINING, "train_iters": 20, "save_interval": 10}
    document |= {"data_path": [write_tokens(tmp_path)], "save": str(tmp_path / "model")}
    summary = run("pretrain", document, kube(fake, tmp_path))
    assert summary.output_digest
    log = Path(summary.log).read_text()
    assert "0: " in log
    steps = ledger_steps(tmp_path / "model")
    assert steps == sorted(set(steps))
    assert max(steps) == 20


def ledger_steps(folder: Path) -> list[int]:
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [step for line in lines if (step := json.loads(line).get("step"))]


FLOW = """
import asyncio, json, sys
from prefect.logging import disable_run_logger
from flows.recipes.stage_job import stage_job
from flows.backends.kubernetes.options import Claim, KubernetesOptions
from flows.backends.spec import Resources
from flows.yard.profile import StageEnvironment
from flows.runner.stage_task import run_stage_task

given = json.loads(sys.argv[1])
claims = (Claim(name="yard", target=given["folder"]),)
place = StageEnvironment(
    run_folder=given["folder"] + "/runs",
    backend="kubernetes",
    image="yard/cpu:1",
    environment=given["network"],
    resources_by_stage={"pretrain": Resources(nodes=2)},
    kubernetes=KubernetesOptions(namespace="yard", kubeconfig=given["kubeconfig"], claims=claims),
)
with disable_run_logger():
    job = stage_job("pretrain", given["document"], "test")
    print(asyncio.run(run_stage_task.fn(job, place)).output_digest)
"""


def begin(fake: FakeKube, folder: Path, document: dict[str, Any]) -> subprocess.Popen[str]:
    given = {"folder": str(folder), "kubeconfig": str(fake.kubeconfig)}
    given |= {"network": NETWORK, "document": document}
    command = [sys.executable, "-c", FLOW, json.dumps(given)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_killed_flow_costs_no_step_and_no_second_job(fake: FakeKube, tmp_path: Path) -> None:
    document = {**TRAINING, "data_path": [write_tokens(tmp_path)], "save": str(tmp_path / "model")}
    fake.asked.clear()
    attempts = tmp_path / "runs" / "pretrain"
    log = attempts / job_key(FLOW_RUN, str(attempts), 1) / "log.txt"
    with begin(fake, tmp_path, document) as flow:
        deadline = time.monotonic() + 120
        while not log.exists() or "iteration " not in log.read_text():
            assert flow.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        flow.send_signal(signal.SIGKILL)
    with begin(fake, tmp_path, document) as flow:
        out, _ = flow.communicate(timeout=200)
    assert flow.returncode == 0, log.read_text()
    assert [path for verb, path in fake.asked if verb == "POST" and path.endswith("/jobs")] == [
        "/apis/batch/v1/namespaces/yard/jobs"
    ]
    steps = ledger_steps(tmp_path / "model")
    assert steps == sorted(set(steps))
    assert max(steps) == TRAINING["train_iters"]
    assert out.strip()
