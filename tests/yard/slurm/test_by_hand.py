"""The script that a flow kept, submitted to Slurm again by a person, as docs/slurm.md says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows.backends.run_folder import LOG
from flows.backends.slurm.script import SCRIPT
from flows.backends.spec import Resources
from flows.recipes.stage_job import stage_job
from flows.recipes.summary import Summary
from flows.runner.stage_task import StageEnvironment, run_stage_task
from tests.yard.jobs import MODEL, TRAINING, wait_until, write_tokens
from tests.yard.slurm.cluster import ask
from tests.yard.yard import ROOT
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]

NETWORK = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PERSONS = ("PATH", "HOME", "SLURM_CONF")
"""What a login shell knows; nothing of the flow."""


@dataclass
class Kept:
    """What a stage that a flow ran left for a person."""

    folder: Path
    """The run folder."""
    output: Path
    digest: str

    @property
    def script(self) -> Path:
        return self.folder / SCRIPT

    def submit(self, elsewhere: Path) -> str:
        """As docs/slurm.md says; the job's word on its end."""
        for name in ("exit.json", "outcome.json"):
            (self.folder / name).unlink(missing_ok=True)
        elsewhere.mkdir(exist_ok=True)
        shell = {name: os.environ[name] for name in PERSONS if name in os.environ}
        command = ["sbatch", str(self.script)]
        output = subprocess.run(
            command, cwd=elsewhere, env=shell, capture_output=True, text=True, check=True
        ).stdout
        found = re.fullmatch(r"Submitted batch job (\d+)\n", output)
        assert found is not None, output

        def shown() -> str:
            return ask("scontrol", "show", "job", "--oneliner", found[1])

        wait_until(lambda: re.search(r"JobState=(?!PENDING|RUNNING|COMPLETING)", shown()))
        return shown()

    def outcome(self) -> dict[str, Any]:
        """The last line of the stage itself."""
        document: dict[str, Any] = json.loads((self.folder / "outcome.json").read_text())
        return document

    def manifest_digest(self) -> str:
        found = read_manifest(f"{self.output}/manifest.json")
        assert found is not None, (self.folder / LOG).read_text()
        return found[0].output_digest


def made_by_a_flow(folder: Path, stage: str, document: dict[str, Any], output: Path) -> Kept:
    """Run a stage through the block; on two nodes, where it trains."""
    two = {"pretrain": Resources(nodes=2, processes_per_node=1, cpus_per_node=1)}
    place = StageEnvironment(
        run_folder=str(folder / "runs"),
        backend="slurm",
        environment=NETWORK,
        resources_by_stage=two,
    )
    with disable_run_logger():
        summary: Summary = asyncio.run(run_stage_task.fn(stage_job(stage, document, "test"), place))
    assert not summary.reused
    return Kept(Path(summary.log).parent, output, summary.output_digest)


def check_by_hand(kept: Kept, elsewhere: Path) -> None:
    """Twice: with the output there, and gone."""
    script = kept.script.read_bytes()
    assert "JobState=COMPLETED" in (shown := kept.submit(elsewhere)), shown
    assert "ExitCode=0:0" in shown
    assert kept.outcome()["outcome"] == "noop"
    assert kept.manifest_digest() == kept.digest

    shutil.rmtree(kept.output)
    assert "JobState=COMPLETED" in (shown := kept.submit(elsewhere)), shown
    assert "ExitCode=0:0" in shown
    assert kept.outcome()["outcome"] == "ran"
    assert kept.outcome()["output_digest"] == kept.manifest_digest() == kept.digest
    assert kept.script.read_bytes() == script
    assert not list(elsewhere.iterdir())  # all it writes lies where it lay


def test_a_stage_by_hand_is_a_no_op_or_makes_what_was_removed(tmp_path: Path) -> None:
    output = tmp_path / "plan"
    document = {**MODEL, "vocab_size": 300, "output_dir": str(output)}
    kept = made_by_a_flow(tmp_path, "plan", document, output)
    check_by_hand(kept, tmp_path / "elsewhere")


@pytest.mark.full
def test_a_training_on_two_nodes_by_hand_makes_the_same_weights(tmp_path: Path) -> None:
    output = tmp_path / "model"
    document = {**TRAINING, "train_iters": 20, "save_interval": 10, "save": str(output)}
    document["data_path"] = [write_tokens(tmp_path)]
    kept = made_by_a_flow(tmp_path, "pretrain", document, output)
    check_by_hand(kept, tmp_path / "elsewhere")
    log = (kept.folder / LOG).read_text()
    assert "0: " in log
    assert "1: " in log
