"""Bad luck that must end well, on a real server, a real store and real disks.

Here the part that is quick; tests/yard/test_faults_full.py has the rest. A container's own bad luck
is in test_container.py, that of a cluster in test_slurm.py, cancelling in test_deployment.py."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.yard.containers import running_engine
from tests.yard.faults import (
    Server,
    closed_store,
    logs,
    start_stage,
    steps,
    training,
    wait_for,
)
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

MODEL = "num_layers = 1\nhidden_size = 32\nnum_attention_heads = 2\nseq_length = 8\n"


def plan(folder: Path, output: str) -> str:
    """The document of a stage that takes a second; its path."""
    path = folder / "plan.toml"
    path.write_text(f'{MODEL}vocab_size = 300\noutput_dir = "{output}"\n')
    return str(path)


def flow_runs(server: Server) -> list[str]:
    """The state of each flow run that the server knows."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/flow_runs/filter", b"{}", head)
    with urllib.request.urlopen(request) as answer:
        return [run["state_type"] for run in json.load(answer)]


def test_a_server_that_dies_in_the_middle_of_a_run_costs_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path / "home")
    try:
        cache = {"TRAINYARD_CACHE": str(tmp_path / "cache")}
        yard = Yard(tmp_path, {"PREFECT_API_URL": server.url, **cache})
        save = tmp_path / "save"
        flow = start_stage(yard, "pretrain", training(tmp_path, str(save), 150))
        wait_for(lambda: steps(save))
        server.kill()
        time.sleep(3)
        server.start()
        ended = flow.ends()
        assert ended.status == 0, ended.said
        assert ended.states("pretrain") == ["runs", "done"]
        assert steps(save)[-1] == 150
        assert flow_runs(server) == ["COMPLETED"]
    finally:
        server.kill()


def test_of_two_flows_for_one_output_one_works_and_the_other_reuses(
    tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    document = training(tmp_path, str(tmp_path / "save"), 100)
    flows = [start_stage(yard, "pretrain", document) for _ in range(2)]
    ended = [flow.ends() for flow in flows]
    assert [each.status for each in ended] == [0, 0], ended
    last = sorted(each.states("pretrain")[-1] for each in ended)
    assert last == ["done", "reused"]


def test_wrong_credentials_are_told_in_seconds_and_not_tried_again(
    tmp_path: Path, prefect_api: dict[str, str], store: dict[str, str]
) -> None:
    yard = Yard(tmp_path, {**prefect_api, **store, "AWS_SECRET_ACCESS_KEY": "mistyped"})
    document = plan(tmp_path, f"s3://yard-tests/{tmp_path.name}")
    ended = start_stage(yard, "plan", document).ends()
    assert ended.status == 2, ended.said
    assert ended.states("plan") == ["runs", "failed"]
    assert "SignatureDoesNotMatch" in ended.said
    assert "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in ended.said
    assert ended.seconds < 30


@pytest.mark.parametrize(
    ("key", "named"), [("AKIANOBODY", "InvalidAccessKeyId"), ("", "no credentials; set AWS_ACCESS")]
)
def test_a_stage_by_itself_tells_wrong_credentials_as_well(
    tmp_path: Path, store: dict[str, str], key: str, named: str
) -> None:
    given = {**store, "AWS_ACCESS_KEY_ID": key} if key else without_keys(store)
    document = plan(tmp_path, f"s3://yard-tests/{tmp_path.name}")
    ended = Yard(tmp_path, given).run("-m", "stages.plan", "--config", document)
    assert ended.status == 2, ended.err
    assert named in ended.err


def without_keys(store: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in store.items() if not name.endswith(("_ID", "_KEY"))}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A store that checks signatures: the environment that opens it."""
    with closed_store(tmp_path_factory.mktemp("store")) as environment:
        yield environment


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    folder = tmp_path / "disk"
    folder.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(small, check=False, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("this machine lets nobody mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_told_and_when_there_is_room_again_training_goes_on(
    tmp_path: Path, small_disk: Path, prefect_api: dict[str, str]
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    flow = start_stage(yard, "pretrain", training(tmp_path, str(small_disk / "save"), 60))
    wait_for(lambda: "No space left on device" in logs(tmp_path))
    room = ["mount", "-o", "remount,size=64m", str(small_disk)]
    subprocess.run(room, check=True)
    ended = flow.ends()
    assert ended.status == 0, ended.said
    assert ended.states("pretrain") == ["runs", "failed", "runs", "done"]
    assert steps(small_disk / "save")[-1] == 60


IN_A_CONTAINER = """
import asyncio, sys
from prefect import flow
from flows.job import stage_job
from flows.launch.outcome import StageError
from flows.stage_task import Place, run_stage_task

folder, image = sys.argv[1:]
model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
job = stage_job("plan", {**model, "vocab_size": 300, "output_dir": folder + "/plan"}, "test")

@flow
async def once():
    await run_stage_task(job, Place(run_folder=folder + "/runs", block="container", image=image))

try:
    asyncio.run(once())
except StageError as error:
    print(error, file=sys.stderr)
    raise SystemExit(error.exit_status)
"""


@pytest.mark.usefixtures("engine")
def test_an_image_that_is_missing_ends_the_flow_at_once_and_in_words(
    tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    script = tmp_path / "flow.py"
    script.write_text(IN_A_CONTAINER)
    yard = Yard(tmp_path, {**prefect_api, "PYTHONPATH": "."})
    ended = yard.run(str(script), str(tmp_path), "trainyard/nowhere:1.0")
    assert ended.status == 2, ended.err
    assert "image trainyard/nowhere:1.0 is not on the Docker engine" in ended.err
    assert "AwaitingRetry" not in ended.err
    assert ended.seconds < 30


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    with running_engine():
        yield
