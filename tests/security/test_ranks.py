"""Ranks of one machine are out of reach of others; those of several have no guessable name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml

from flows.backends.kubernetes.manifests import RENDEZVOUS_ID, render_kubernetes
from flows.backends.kubernetes.options import Claim, KubernetesOptions
from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.script import render_slurm
from flows.backends.spec import LaunchSpec, Resources
from tests.ports import free_port
from tests.security.listeners import beyond_loopback, listeners, reaches
from tests.stages.pretrain_runs import write_documents
from trainyard.parallel.rendezvous import INTERFACES, open_store, store_prefix

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", *INTERFACES)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.setenv(name, "")  # restored after a test that sets it
        monkeypatch.delenv(name)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_the_store_of_one_machine_listens_on_loopback_only(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    before = listeners(os.getpid())
    store = open_store(0, 1, timedelta(seconds=20))
    numeric = address.replace("localhost", "127.0.0.1")
    assert listeners(os.getpid()) - before == {(numeric, port)}
    assert reaches(numeric, port)
    assert not reaches("127.0.0.9", port)  # as from another machine: another address of this one
    store.set("key", "value")
    assert open_store(1, 1, timedelta(seconds=20)).get("key") == b"value"


def test_a_second_store_of_a_process_has_the_first_ones_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    first = open_store(0, 1, timedelta(seconds=20))
    before = listeners(os.getpid())
    second = open_store(0, 1, timedelta(seconds=20))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert listeners(os.getpid()) == before


def test_gloo_and_nccl_stay_on_loopback_unless_a_site_names_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    open_store(0, 1, timedelta(seconds=20))
    assert {name: os.environ[name] for name in INTERFACES} == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "ib0",
    }


def test_keys_of_the_store_have_the_launchs_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7-0-f00d")
    assert store_prefix() == "trainyard/7-0-f00d/0"


# --- over several nodes -----------------------------------------------------------------------


def spec(**values: object) -> LaunchSpec:
    given: dict[str, object] = {"name": "pretrain", "command": ("true",), "key": "7c1f-1"}
    given |= {"run_directory": "/yard/.runs/pretrain/7c1f-1", "image": None}
    given["resources"] = Resources(nodes=2, processes_per_node=4)
    return LaunchSpec(**{**given, **values})  # type: ignore[arg-type]


def rendezvous_id_of_slurm(job: int) -> str:
    """What the script of a job gives torchrun as its id."""
    lines = render_slurm(spec(), SlurmOptions()).splitlines()
    script = [line for line in lines if "PET_RDZV_ID" in line]
    assert not any("--rdzv-id" in line for line in lines)
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*script, "sh -c 'echo $PET_RDZV_ID'"])],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": str(job)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_rendezvous_of_a_slurm_job_does_not_follow_from_its_number() -> None:
    first, second = rendezvous_id_of_slurm(7), rendezvous_id_of_slurm(7)
    assert first != second
    for one in (first, second):
        job, restarts, random = one.split("-")
        assert (job, restarts, len(bytes.fromhex(random))) == ("7", "0", 16)


def test_torchrun_reads_the_id_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    monkeypatch.setenv(RENDEZVOUS_ID, "7-0-f00d")
    assert parse_args(["--nnodes", "2", "program.py"]).rdzv_id == "7-0-f00d"


def test_the_pods_of_a_kubernetes_job_meet_under_the_id_given() -> None:
    site = KubernetesOptions(claims=(Claim(name="yard", target="/yard"),))
    for nodes, expected in ((2, ["f00d"]), (1, [])):
        job = spec(image="yard", resources=Resources(nodes=nodes, processes_per_node=4))
        text = yaml.safe_dump(render_kubernetes(job, site, "f00d")[-1])
        (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
        found = [one["value"] for one in container["env"] if one["name"] == RENDEZVOUS_ID]
        assert found == expected


# --- a run ------------------------------------------------------------------------------------

SHAPE = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0
    --attention-dropout 0 --micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --lr 1e-2
    --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 31 --split 100,0,0
    --make-vocab-size-divisible-by 8 --nproc-per-node 2 --tensor-model-parallel-size 2
    --train-iters 100000
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_nothing_outside_this_machine_reaches_a_training_of_two_ranks(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 31, (40, 100)).tolist()
    tokens, log = write_documents(tmp_path / "text", numbers), tmp_path / "log"
    command = [sys.executable, "-m", "stages.pretrain", *SHAPE.split(), "--data-path", tokens]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--save", str(tmp_path / "run")], stdout=output, stderr=output
        )
    try:
        found = set()
        deadline = time.monotonic() + 90
        while "iteration        3/" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            found |= listeners(process.pid)
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert len(found) >= 3  # the store, and gloo on each rank
    assert beyond_loopback(found) == set()
