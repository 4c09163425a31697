"""Faults of a real server, store and disk that a flow survives: the quick ones."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.runner.limits import LOST_SECONDS
from tests.flows import disks
from tests.yard.container.containers import running_engine
from tests.yard.faults.faults import (
    Server,
    closed_store,
    in_training,
    logs,
    plan,
    start_stage,
    steps,
    training,
    wait_for,
)
from tests.yard.limited import LIMIT, limit_training, taken
from tests.yard.operator.deployed import Api
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]


@pytest.fixture
def server(mortal: Server) -> Server:
    """One on which one training at a time may run."""
    limit_training(mortal.url)
    return mortal


def test_killed_server_costs_nothing(tmp_path: Path, server: Server, yard: Yard) -> None:
    save = tmp_path / "save"
    flow = in_training(yard, save, 150)
    server.kill()
    time.sleep(3)
    server.start()
    assert taken(server.url) == 1
    ended = flow.ends()
    assert ended.status == 0, ended.output
    assert ended.states("pretrain") == ["runs", "done"]
    assert steps(save)[-1] == 150
    runs = Api(server.url).ask("flow_runs/filter", {})
    assert [run["state_type"] for run in runs] == ["COMPLETED"]
    # Its slot is free again: the next training does not wait.
    assert taken(server.url) == 0
    following = start_stage(yard, "pretrain", training(tmp_path, str(tmp_path / "next"), 20)).ends()
    assert following.status == 0, following.output
    assert following.states("pretrain") == ["runs", "done"]
    assert "waits" not in following.output


# --- slots of a limit -----------------------------------------------------------------------------


def doctor(server: Server, yard: Yard) -> str:
    """What doctor says of the slots, in one line."""
    seen = yard.run(
        "-m", "flows.doctor", "--only", "Prefect", "--only", "versions", "--only", "slots"
    )
    assert seen.status == 0, seen.out + seen.err
    return " ".join(seen.out.split())


@pytest.mark.full
def test_orphaned_slot_is_named_and_freed(tmp_path: Path, server: Server, yard: Yard) -> None:
    Api(server.url).ask(f"v2/concurrency_limits/{LIMIT}", {"active_slots": 1}, method="PATCH")
    flow = start_stage(yard, "pretrain", training(tmp_path, str(tmp_path / "save"), 20))
    command = f"prefect gcl update {LIMIT} --active-slots 0"
    report = doctor(server, yard)
    assert f"1 of 1 slots of {LIMIT} in use, 1 of them by nothing that has a lease" in report
    assert command in report
    time.sleep(LOST_SECONDS + 5)
    assert taken(server.url) == 1
    freed = yard.run("-m", *shlex.split(command))
    assert freed.status == 0, freed.out + freed.err
    ended = flow.ends(30)
    assert ended.status == 0, ended.output
    waiting = [line for line in ended.output.splitlines() if " waits " in line]
    assert len(waiting) == 2
    assert f"1 of 1 slots of {LIMIT} in use" in waiting[0]
    assert f"PREFECT_API_URL={server.url}/ {command}" in waiting[1]
    assert f"1 slots of {LIMIT}" in doctor(server, yard)


@pytest.mark.full
def test_waiting_flow_ends_at_sigterm(tmp_path: Path, server: Server, yard: Yard) -> None:
    save = tmp_path / "save"
    first = in_training(yard, save, 100_000)
    console = tmp_path / "said.txt"
    with console.open("w") as err:
        document = training(tmp_path, str(tmp_path / "next"), 20)
        command = ("-m", "flows.run_stage", "pretrain", "--config", document)
        second = yard.start(*command, stderr=err)
    wait_for(lambda: " waits " in console.read_text())
    assert (
        f"1 of 1 slots of {LIMIT} in use, by pretrain of flow run pretrain" in console.read_text()
    )
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=15)
    assert second.returncode == 128 + signal.SIGTERM
    assert taken(server.url) == 1
    first.process.send_signal(signal.SIGTERM)
    assert first.ends(60).status == 128 + signal.SIGTERM
    assert taken(server.url) == 0


@pytest.mark.full
def test_two_flows_share_one_output(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    document = training(tmp_path, str(tmp_path / "save"), 100)
    flows = [start_stage(yard, "pretrain", document) for _ in range(2)]
    ended = [flow.ends() for flow in flows]
    assert [each.status for each in ended] == [0, 0], ended
    last = sorted(each.states("pretrain")[-1] for each in ended)
    assert last == ["done", "reused"]


def test_wrong_secrets(tmp_path: Path, prefect_api: dict[str, str], store: dict[str, str]) -> None:
    yard = Yard(tmp_path, {**prefect_api, **store, "AWS_SECRET_ACCESS_KEY": "mistyped"})
    document = plan(tmp_path, f"s3://yard-tests/{tmp_path.name}")
    ended = start_stage(yard, "plan", document).ends()
    assert ended.status == 2, ended.output
    assert ended.states("plan") == ["runs", "failed"]
    assert "SignatureDoesNotMatch" in ended.output
    assert "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in ended.output
    assert ended.seconds < 30


@pytest.mark.parametrize(
    ("key", "named"), [("AKIANOBODY", "InvalidAccessKeyId"), ("", "no credentials; set AWS_ACCESS")]
)
def test_stage_with_wrong_keys(tmp_path: Path, store: dict[str, str], key: str, named: str) -> None:
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
    with disks.small_disk(tmp_path / "disk", "256k") as folder:
        yield folder


def test_full_disk_then_room(tmp_path: Path, small_disk: Path, prefect_api: dict[str, str]) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    flow = start_stage(yard, "pretrain", training(tmp_path, str(small_disk / "save"), 60))
    wait_for(lambda: "No space left on device" in logs(tmp_path))
    disks.give_room(small_disk)
    ended = flow.ends()
    assert ended.status == 0, ended.output
    assert ended.states("pretrain") == ["runs", "failed", "runs", "done"]
    assert steps(small_disk / "save")[-1] == 60


IN_A_CONTAINER = """
import asyncio, sys
from prefect import flow
from flows.recipes.stage_job import stage_job
from flows.backends.outcome import StageError
from flows.runner.stage_task import StageEnvironment, run_stage_task

folder, image = sys.argv[1:]
model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
job = stage_job("plan", {**model, "vocab_size": 300, "output_dir": folder + "/plan"}, "test")

@flow
async def once():
    place = StageEnvironment(run_folder=folder + "/runs", backend="container", image=image)
    await run_stage_task(job, place)

try:
    asyncio.run(once())
except StageError as error:
    print(error, file=sys.stderr)
    raise SystemExit(error.exit_status)
"""


@pytest.mark.usefixtures("engine")
def test_missing_image_ends_the_flow(tmp_path: Path, prefect_api: dict[str, str]) -> None:
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
