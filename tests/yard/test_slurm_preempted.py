"""A training on two nodes of a real Slurm that others push out: tried again by itself, it goes on
from what it has saved."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.yard.cluster import Cluster, ask
from tests.yard.deployed import comes
from tests.yard.faults import steps, training
from tests.yard.yard import ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(400)]

PROFILE = """
block = "slurm"
python = "{python}"
run_folder = "{folder}/runs"

[resources.pretrain]
nodes = 2
processes_per_node = 1
cpus_per_node = 1

[slurm]
partition = "{partition}"

[environment]
OMP_NUM_THREADS = "1"
GLOO_SOCKET_IFNAME = "eth0"
PYTHONPATH = "{root}"
"""

ITERATIONS = 1500


@pytest.mark.full
@pytest.mark.parametrize(
    ("partition", "submissions"), [("spot", 2), ("debug", 1)], ids=["with grace", "requeued"]
)
def test_a_training_that_others_push_out_goes_on_by_itself(
    cluster: Cluster, tmp_path: Path, partition: str, submissions: int
) -> None:
    environment = {"TRAINYARD_CACHE": str(tmp_path / "cache")}
    yard = Yard(tmp_path, {**environment, "SLURM_CONF": os.environ["SLURM_CONF"]})
    profile = tmp_path / "site.toml"
    profile.write_text(
        PROFILE.format(python=sys.executable, folder=tmp_path, root=ROOT, partition=partition)
    )
    save = tmp_path / "save"
    document = training(tmp_path, str(save), ITERATIONS, save_interval=100)
    arguments = ("pretrain", "--config", document, "--profile", str(profile))
    said = tmp_path / "said.txt"
    with said.open("w") as stderr:
        flow = yard.start("-m", "flows.run_stage", *arguments, stderr=stderr)
        assert comes(120, lambda: steps(save)), said.read_text()
        others = ("--job-name=others", "--partition=urgent", "--nodelist=node2", "--exclusive")
        ask("sbatch", *others, "--output=/dev/null", "--wrap=sleep 5")
        flow.communicate(timeout=250)
    folders = sorted(tmp_path.glob("runs/*/pretrain/*"))
    log = "".join((one / "log.txt").read_text() for one in folders)
    assert flow.returncode == 0, said.read_text() + log
    assert len(folders) == submissions
    if submissions > 1:
        kinds = [json.loads((one / "settled.json").read_text())["kind"] for one in folders]
        assert kinds == ["preempted", "done"]
    before, _, after = log.partition("continuing from step ")
    saved = max(map(int, re.findall(r"saved checkpoint step=(\d+)", before)))
    assert int(after.split()[0]) == saved
    made = [json.loads(line).get("step") for line in (save / "ledger.jsonl").open()]
    trained = [step for step in made if step]
    assert trained == sorted(set(trained))
    assert steps(save)[-1] == ITERATIONS
