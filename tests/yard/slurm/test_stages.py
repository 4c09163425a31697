"""Stages as jobs of a real Slurm, started by the task of a flow that may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows.backends.outcome import Kind, StageError
from flows.backends.run_folder import LOG, STOP_RECORD, SUBMITTED, job_key
from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.script import EXIT, SCRIPT, job_name
from flows.backends.spec import LaunchSpec
from flows.cli.run_flow import fail
from flows.recipes.stage_job import stage_job
from flows.recipes.summary import Summary
from flows.runner.stage_task import StageEnvironment, run_stage_task
from flows.runner.submission import SETTLED
from tests.yard.jobs import FLOW_RUN, MODEL, TRAINING, killed, wait_until, write_tokens
from tests.yard.slurm.cluster import Cluster, ask
from tests.yard.yard import ROOT
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]


@pytest.fixture(autouse=True)
def at_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a checkout need not be installed
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)


def plan(folder: Path, block: str, **options: Any) -> Summary:
    document = {**MODEL, "vocab_size": 300, "output_dir": str(folder / "plan"), **options}
    job = stage_job("plan", document, "test")
    with disable_run_logger():
        return asyncio.run(
            run_stage_task.fn(job, StageEnvironment(run_folder=str(folder), backend=block))
        )


def test_a_stage_makes_on_slurm_what_it_makes_here_and_is_reused(tmp_path: Path) -> None:
    first = plan(tmp_path / "slurm", "slurm")
    assert not first.reused
    assert first.output_digest == plan(tmp_path / "here", "process").output_digest
    again = plan(tmp_path / "slurm", "slurm")
    assert again.reused
    runs = tmp_path / "slurm" / "plan"
    keys = {job_key(FLOW_RUN, str(runs), count) for count in (1, 2)}
    assert keys <= {path.name for path in runs.iterdir()}


def test_the_script_that_is_kept_makes_the_same_when_a_person_submits_it(tmp_path: Path) -> None:
    made, output = tmp_path / "made", tmp_path / "output"
    digest = plan(made, "slurm", output_dir=str(output)).output_digest
    (script,) = made.glob(f"plan/*/{SCRIPT}")
    shutil.rmtree(output)
    ended = script.with_name(EXIT)
    ended.unlink()
    ask("sbatch", str(script))
    wait_until(ended.exists)
    found = read_manifest(f"{output}/manifest.json")
    assert found is not None, script.with_name(LOG).read_text()
    assert found[0].output_digest == digest


def test_the_message_of_a_wrong_option_reaches_the_outcome(tmp_path: Path) -> None:
    document = {**MODEL, "vocab_size": 300, "output_dir": str(tmp_path / "plan")}
    passed = stage_job("plan", document, "test")
    wrong = replace(passed, document={**document, "hidden_size": 31})  # past the first validation
    with disable_run_logger(), pytest.raises(StageError, match="hidden-size") as caught:
        asyncio.run(
            run_stage_task.fn(wrong, StageEnvironment(run_folder=str(tmp_path), backend="slurm"))
        )
    assert caught.value.outcome.kind is Kind.CONFIG


def test_a_refusal_of_slurm_is_a_wrong_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = stage_job("plan", {**MODEL, "vocab_size": 300, "output_dir": str(tmp_path)}, "test")
    nowhere = SlurmOptions(partition="nowhere")
    place = StageEnvironment(run_folder=str(tmp_path), backend="slurm", slurm=nowhere)
    with disable_run_logger(), pytest.raises(StageError, match="Invalid partition") as caught:
        asyncio.run(run_stage_task.fn(job, place))
    assert fail(caught.value) == 2
    (script,) = tmp_path.glob(f"plan/*/{SCRIPT}")
    assert capsys.readouterr().err.endswith(f"       submitted: {script}\n")
    assert not script.with_name(LOG).exists()  # so it is not named


HELD = """
import asyncio, json, sys
from prefect.logging import disable_run_logger
from flows.recipes.stage_job import stage_job
from flows.backends.slurm.options import SlurmOptions
from flows.runner.stage_task import StageEnvironment, run_stage_task

given = json.loads(sys.argv[1])
options = SlurmOptions(extra=("--hold",))
with disable_run_logger():
    job = stage_job("plan", given["document"], "test")
    place = StageEnvironment(run_folder=given["folder"], backend="slurm", slurm=options)
    asyncio.run(run_stage_task.fn(job, place))
"""


WAITS = """#!/bin/sh
# Slurm's own where a file lets it; so long the flow is cancelling.
until [ -e {gate} ]; do sleep 0.1; done
exec {scancel} "$@"
"""


@pytest.fixture
def slow_scancel(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a program whose scancel waits until the test is over."""
    found = shutil.which("scancel")
    programs, gate = tmp_path / "bin", tmp_path / "gate"
    programs.mkdir()
    (programs / "scancel").write_text(WAITS.format(gate=gate, scancel=found))
    (programs / "scancel").chmod(0o755)
    yield {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    gate.touch()


def test_a_flow_killed_in_cancelling_restarts(tmp_path: Path, slow_scancel: dict[str, str]) -> None:
    """Cancel in Prefect's pages, the worker dies over it, and Retry."""
    runs = tmp_path / "plan"
    first, second = (job_key(FLOW_RUN, str(runs), count) for count in (1, 2))
    document = {**MODEL, "vocab_size": 300, "output_dir": str(tmp_path / "plan-made")}
    given = json.dumps({"folder": str(tmp_path), "document": document})
    command = [sys.executable, "-c", HELD, given]
    with killed(subprocess.Popen(command, cwd=ROOT, env=slow_scancel)) as flow:
        wait_until((runs / first / SUBMITTED).exists)
        flow.send_signal(signal.SIGINT)
        wait_until((runs / first / STOP_RECORD).exists)
    assert not (runs / first / SETTLED).exists()
    with disable_run_logger():
        job = stage_job("plan", document, "test")
        place = StageEnvironment(run_folder=str(tmp_path), backend="slurm")
        assert asyncio.run(run_stage_task.fn(job, place)).output_digest
    kinds = [json.loads((runs / key / SETTLED).read_text())["kind"] for key in (first, second)]
    assert kinds == [Kind.STOPPED, Kind.DONE]
    cancelled = json.loads((runs / first / SUBMITTED).read_text())["job_id"]
    assert "JobState=CANCELLED" in ask("scontrol", "show", "job", cancelled)


# --- training on two nodes ------------------------------------------------------------------------

FLOW = """
import asyncio, json, sys
from prefect.logging import disable_run_logger
from flows.recipes.stage_job import stage_job
from flows.backends.spec import Resources
from flows.runner.stage_task import StageEnvironment, run_stage_task

given = json.loads(sys.argv[1])
two = {"pretrain": Resources(nodes=2, processes_per_node=1, cpus_per_node=1)}
network = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
place = StageEnvironment(
    run_folder=given["runs"], backend="slurm", resources_by_stage=two, environment=network
)
with disable_run_logger():
    job = stage_job("pretrain", given["document"], "test")
    print(asyncio.run(run_stage_task.fn(job, place)).output_digest)
"""


def begin(folder: Path, document: dict[str, Any]) -> subprocess.Popen[str]:
    given = json.dumps({"runs": str(folder / "runs"), "document": document})
    return subprocess.Popen(
        [sys.executable, "-c", FLOW, given], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_a_killed_flow_costs_no_step_and_no_second_job(cluster: Cluster, tmp_path: Path) -> None:
    document = {**TRAINING, "data_path": [write_tokens(tmp_path)]}
    disturbed = {**document, "save": str(tmp_path / "killed")}
    runs = tmp_path / "runs" / "pretrain"
    key = job_key(FLOW_RUN, str(runs), 1)
    run = runs / key
    log = run / "log.txt"
    with killed(begin(tmp_path, disturbed)) as flow:
        wait_until(lambda: log.exists() and "iteration " in log.read_text())
        assert flow.poll() is None
    with begin(tmp_path, disturbed) as flow:
        out, _ = flow.communicate(timeout=200)
    assert flow.returncode == 0, (run / "log.txt").read_text()
    spec = LaunchSpec(name="pretrain", command=("x",), run_directory=str(run), key=key)
    shown = ask("squeue", "--noheader", "--states=all", f"--name={job_name(spec)}", "--format=%i")
    assert len(shown.split()) == 1
    assert [path.name for path in run.parent.iterdir()] == [key]
    lines = (tmp_path / "killed" / "ledger.jsonl").read_text().splitlines()
    steps = [json.loads(line).get("step") for line in lines]
    steps = [step for step in steps if step]
    assert steps == sorted(set(steps))
    assert max(steps) == TRAINING["train_iters"]
    assert out.strip()
    assert os.path.exists(tmp_path / "killed" / "manifest.json")
