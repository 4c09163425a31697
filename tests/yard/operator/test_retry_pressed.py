"""Retry pressed in Prefect's pages, after a run that failed and after one whose machine died."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.yard.faults.faults import steps, training
from tests.yard.operator.deployed import ENDED, WholeServer, comes, pids, register, working
from tests.yard.slurm.cluster import ask
from tests.yard.yard import COLLECTED, ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(900)]

LONGER = COLLECTED.replace("train_iters = 6", "train_iters = 300\nsave_interval = 20")


def trained_steps(save: Path) -> list[int]:
    """The steps of a ledger, as often as they were made."""
    found = [json.loads(line).get("step") for line in (save / "ledger.jsonl").open()]
    return [step for step in found if step]


@pytest.mark.full
def test_retry_reuses_stages_and_resumes_the_last_one(tmp_path: Path, server: WholeServer) -> None:
    """A training that somebody ended: the run fails, a person looks, and presses Retry."""
    cache = {"TRAINYARD_CACHE": str(tmp_path / "cache")}
    yard = Yard(tmp_path, {**server.environment, **cache})
    register(yard, "local")
    with working(yard, "local") as worker:
        run = server.begin("pretrain-gpt/local", recipe=yard.recipe(LONGER))
        checkpoint = yard.tiny / "checkpoint"
        assert comes(120, lambda: steps(checkpoint)), worker.output
        (stage,) = pids(f"stages.pretrain --config {yard.tiny}")
        os.kill(stage, signal.SIGTERM)
        assert comes(60, lambda: server.state(run) in ENDED), worker.output
        assert server.state(run) == "FAILED"
        reached = steps(checkpoint)[-1]
        assert 0 < reached < 300

        server.press_retry(run)
        assert comes(300, lambda: server.state(run) in ENDED), worker.output
    assert server.state(run) == "COMPLETED", worker.output
    flow_run = server.ask(f"flow_runs/{run}")
    assert flow_run["run_count"] == 2
    assert steps(checkpoint)[-1] == 300
    trained = trained_steps(checkpoint)
    assert trained == sorted(set(trained))  # no step was made twice
    shown = server.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}})
    both = [one for one in shown if one["key"] == "pretrain-gpt-stages"]
    stages = max(both, key=lambda one: str(one["created"]))["data"]
    for stage_name in ("collect", "train_tokenizer", "merge", "plan"):
        assert f"| `{stage_name}` | reused |" in stages
    assert "| `pretrain` | done |" in stages


# --- a machine that is gone -----------------------------------------------------------------------

PROFILE = """
block = "slurm"
python = "{folder}/python"
run_folder = "{folder}/runs"
deployments = ["run-stage"]

[resources]
cpus_per_node = 1

[environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{root}"

[automations]
zombie_seconds = 60
resume_crashed = 0
"""

STAYS = """#!/bin/bash
# A stage that lives for as long as the test does; any other is what it is.
[[ " $* " == *" stages.benchmark "* ]] && exec sleep 600
exec {python} "$@"
"""

STEPS = 2000
"""So many that it still trains when a second worker has begun, and ends soon after Retry."""

BENCHMARK = 'load = "none"\nprompts = ["x"]\n'


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
def test_retry_follows_the_job_of_a_dead_machine(tmp_path: Path, server: WholeServer) -> None:
    """Worker and flow are killed in the middle of a training on Slurm. The server notices by
    itself, marks that run and no other; Retry follows the one job that there is."""
    yard = Yard(tmp_path, {**server.environment, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    python = tmp_path / "python"
    python.write_text(STAYS.format(python=sys.executable))
    python.chmod(0o755)
    profile = tmp_path / "site.toml"
    profile.write_text(PROFILE.format(folder=tmp_path, root=ROOT))
    register(yard, str(profile))
    save = tmp_path / "save"
    document = training(tmp_path, str(save), STEPS, save_interval=50)
    stays = tmp_path / "stays.toml"
    stays.write_text(BENCHMARK)
    with working(yard, "site", "first", "--limit", "1") as first:
        lost = server.begin("run-stage/site", stage="pretrain", config=document)
        assert comes(90, lambda: steps(save)), first.output
        with working(yard, "site", "second", "--limit", "1") as second:
            lives = server.begin("run-stage/site", stage="benchmark", config=str(stays))
            assert comes(60, lambda: server.state(lives) == "RUNNING"), second.output
            first.power_off()
            killed = time.monotonic()
            assert server.state(lost) == "RUNNING"
            assert comes(120, lambda: server.state(lost) == "CRASHED"), second.output
            assert time.monotonic() - killed > 25  # heard at most 30 s before, silent for 60
            message = server.ask(f"flow_runs/{lost}")["state"]["message"]
            assert "Nothing was heard of this run" in message
            time.sleep(10)
            assert server.state(lives) == "RUNNING"
            server.cancel(lives)
            assert comes(60, lambda: server.state(lives) == "CANCELLED"), second.output

            server.press_retry(lost)
            assert comes(240, lambda: server.state(lost) == "COMPLETED"), second.output
    (run,) = (tmp_path / "runs" / "yard" / "pretrain").iterdir()
    name = f"--name=pretrain-{run.name}"
    assert len(ask("squeue", "--noheader", "--states=all", name, "--format=%i").split()) == 1
    events = (run / "events.jsonl").read_text()
    assert events.count('"submitted"') == 1
    assert '"reattached"' in events
    made = trained_steps(save)
    assert made == sorted(set(made))
    assert steps(save)[-1] == STEPS
