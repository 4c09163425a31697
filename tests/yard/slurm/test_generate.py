"""Two nodes of Slurm divide the prompts of a generation, and write what one process writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows.backends.spec import Resources
from flows.recipes.stage_job import stage_job
from flows.runner.stage_task import StageEnvironment, run_stage_task
from tests.yard.jobs import FLOW_RUN, TRAINING, write_tokens
from tests.yard.slurm.cluster import ask
from tests.yard.yard import ROOT

pytestmark = [
    *(pytest.mark.yard, pytest.mark.full),
    *(pytest.mark.timeout(500), pytest.mark.usefixtures("cluster")),
]

PROMPTS = [f"{n} {n + 1} {n + 2}" for n in range(6)]


def run(stage: str, document: dict[str, Any], **place: Any) -> str:
    """The digest of what a stage makes at a place."""
    job = stage_job(stage, document, "test")
    with disable_run_logger():
        return asyncio.run(run_stage_task.fn(job, StageEnvironment(**place))).output_digest


def test_two_nodes_generate_what_one_process_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)
    runs, model = str(tmp_path / "runs"), str(tmp_path / "model")
    short = {"train_iters": 4, "save_interval": 4, "save": model}
    run("pretrain", {**TRAINING, **short, "data_path": [write_tokens(tmp_path)]}, run_folder=runs)
    document = {"load": model, "prompts": PROMPTS, "num_tokens_to_generate": 4}
    document |= {"inference_max_requests": 1}  # a batch each, so that no place rounds otherwise
    alone = run("generate", {**document, "output_dir": str(tmp_path / "one")}, run_folder=runs)
    shared = run(
        "generate",
        {**document, "output_dir": str(tmp_path / "two")},
        run_folder=runs,
        backend="slurm",
        resources_by_stage={"generate": Resources(nodes=2, cpus_per_node=1)},
        environment={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
    )
    assert shared == alone
    jobs = ask("squeue", "--noheader", "--states=all", "--format=%j %N").splitlines()
    assert [nodes for name, nodes in map(str.split, jobs) if name.startswith("generate-")] == [
        "node[1-2]"
    ]
