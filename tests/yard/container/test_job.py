"""The container block on a real engine: what a stage gets, what is refused, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows.backends.container.job import ContainerJobRun
from flows.backends.container.options import ContainerOptions
from flows.backends.container.render import SCRIPT
from flows.backends.events import read_events
from flows.backends.outcome import Kind
from flows.backends.spec import Mount, Resources
from flows.recipes.stage_job import stage_job
from flows.recipes.summary import Summary
from flows.runner.stage_task import StageEnvironment, run_stage_task
from tests.yard.container.containers import (
    THIS_PYTHON,
    containers,
    counting,
    docker,
    follow,
    job,
    text_of,
    until,
)
from tests.yard.yard import ROOT
from trainyard.errors import ConfigError, InfrastructureError

pytestmark = [pytest.mark.yard, pytest.mark.timeout(180)]


# --- to their end ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "kind"), [(0, Kind.DONE), (2, Kind.CONFIG), (70, Kind.DEFECT)])
def test_exit_status_returns(tmp_path: Path, key: str, image: str, status: int, kind: Kind) -> None:
    block = job(tmp_path, key, image, f"print('here'); raise SystemExit({status})")
    run, outcome = follow(block)
    assert (outcome.kind, outcome.exit_status) == (kind, status)
    assert text_of(block) == "here\n"
    assert run.container_id
    assert containers(key) == []
    events = [event.event for event in read_events(block.spec.run_directory)]
    assert events == ["submitted", "started", "ended"]


FACTS = """
import json, os, pathlib
def may_write(folder):
    try:
        pathlib.Path(folder, "x").write_text("x")
    except OSError:
        return False
    return True
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
facts = {
    "user": f"{os.getuid()}:{os.getgid()}",
    "writes": [f for f in ("/", "/opt", "/tmp", "/data", os.environ["TRAINYARD_RUN_DIR"])
               if may_write(f)],
    "colour": os.environ["COLOUR"],
    "home": os.environ["HOME"],
    "shm": os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks,
    "capabilities": status["CapEff"].strip(),
    "first": open("/proc/1/cmdline").read().split("\\0")[0],
    "cwd": os.getcwd(),
}
print(json.dumps(facts))
"""


def test_a_stage_sees_only_its_mounts(tmp_path: Path, key: str, image: str) -> None:
    data, run = tmp_path / "data", tmp_path / key
    data.mkdir()
    run.mkdir()
    os.chown(run, 1234, 1234)
    block = job(
        tmp_path,
        key,
        image,
        FACTS,
        environment={"COLOUR": "red"},
        working_directory="/data",
        mounts=(Mount(source=str(data), target="/data"),),
        options=ContainerOptions(pull="never", user="1234:1234", shared_memory="96m"),
    )
    assert follow(block)[1].kind is Kind.DONE, text_of(block)
    facts = json.loads(text_of(block))
    assert facts.pop("first").endswith("init")
    assert facts == {
        "user": "1234:1234",
        "writes": ["/tmp", str(run)],
        "colour": "red",
        "home": "/tmp",
        "shm": 96 << 20,
        "capabilities": "0" * 16,
        "cwd": "/data",
    }


COMPARED = (
    *("ReadonlyRootfs", "ShmSize", "Memory", "MemorySwap", "NanoCpus", "Tmpfs", "CapDrop"),
    *("CapAdd", "SecurityOpt", "NetworkMode", "ExtraHosts", "Init", "Mounts", "Ulimits"),
)


def test_the_script_that_is_kept_makes_the_same_container(
    tmp_path: Path, key: str, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    wanted = Resources(cpus_per_node=1, memory_bytes_per_node=256 << 20)
    options = ContainerOptions(pull="never", capabilities=("IPC_LOCK",))
    block = job(tmp_path, key, image, counting(), resources=wanted, options=options)
    found: list[dict[str, Any]] = []

    async def meanwhile(run: ContainerJobRun) -> None:
        script = Path(block.spec.run_directory, SCRIPT)
        assert "somebody" not in script.read_text()
        with subprocess.Popen(["sh", str(script)], stdout=subprocess.DEVNULL) as by_hand:
            await until(lambda: text_of(block, "starts").count("start") == 2)
            for name in docker("ps", "-q").split():
                (seen,) = json.loads(docker("inspect", name))
                if f"TRAINYARD_RUN_DIR={block.spec.run_directory}" in seen["Config"]["Env"]:
                    found.append(seen)
            by_hand.send_signal(signal.SIGTERM)
            await asyncio.to_thread(by_hand.wait)
        await run.stop()

    follow(block, meanwhile)
    ours, theirs = (
        {
            **{name: seen["HostConfig"][name] for name in COMPARED},
            "Env": sorted(seen["Config"]["Env"]),
            **{name: seen["Config"][name] for name in ("Image", "Entrypoint", "Cmd", "User")},
        }
        for seen in found
    )
    for each in (ours, theirs):  # left out or null: the same to the engine
        each["Ulimits"] = each["Ulimits"] or []
        each["Mounts"] = [
            {"Source": m["Source"], "ReadOnly": m.get("ReadOnly", False)} for m in each["Mounts"]
        ]
    assert ours == theirs
    assert "AWS_ACCESS_KEY_ID=somebody" in ours["Env"]


def test_a_store_on_this_machine_is_reached(
    tmp_path: Path, key: str, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"it is me")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    code = "import os, urllib.request as u; print(u.urlopen(os.environ['AWS_ENDPOINT_URL']).read())"
    options = ContainerOptions(pull="never", network="host")
    block = job(tmp_path, key, image, code, options=options)
    assert follow(block)[1].kind is Kind.DONE, text_of(block)
    assert "it is me" in text_of(block)
    server.shutdown()


def test_a_stage_makes_the_same_in_a_container_as_beside_it(tmp_path: Path, image: str) -> None:
    def made(name: str, **place: Any) -> Summary:
        folder = tmp_path / name
        folder.mkdir()
        model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
        document = {**model, "vocab_size": 300, "output_dir": str(folder / "plan")}
        job = stage_job("plan", document, "test")
        with disable_run_logger():
            where = StageEnvironment(run_folder=str(folder / "runs"), **place)
            return asyncio.run(run_stage_task.fn(job, where))

    mounts = (*THIS_PYTHON, Mount(source=str(tmp_path), target=str(tmp_path), read_only=False))
    options = ContainerOptions(pull="never")
    here = {"PYTHONPATH": str(ROOT)}
    inside = made(
        "inside",
        backend="container",
        image=image,
        mounts=mounts,
        container=options,
        environment=here,
    )
    assert inside.output_digest == made("beside").output_digest
    assert "container.sh" in {path.name for path in Path(inside.log).parent.iterdir()}


@pytest.mark.full
def test_ranks_of_one_container_find_each_other(tmp_path: Path, key: str, image: str) -> None:
    code = (
        "import sys, torch, torch.distributed as dist; dist.init_process_group('gloo');"
        "total = torch.tensor([2.0 ** dist.get_rank()]); dist.all_reduce(total);"
        "sys.stdout.write(f'sum {total.item()}\\n'); dist.destroy_process_group()"
    )
    block = job(
        tmp_path,
        key,
        image,
        "",
        command=(sys.executable, "-c", code),
        rank_launcher=(sys.executable, "-m", "torch.distributed.run"),
        resources=Resources(processes_per_node=2),
        mounts=THIS_PYTHON,
        environment={"OMP_NUM_THREADS": "1"},
    )
    assert follow(block)[1].kind is Kind.DONE, text_of(block)
    assert text_of(block).count("sum 3.0") == 2


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize("pull", ["never", "missing"])
def test_missing_image_is_reported_at_once(tmp_path: Path, key: str, image: str, pull: Any) -> None:
    began = time.monotonic()
    block = job(tmp_path, key, "trainyard/nowhere:0", "pass", options=ContainerOptions(pull=pull))
    with pytest.raises(ConfigError, match=r"trainyard/nowhere:0 is not on the Docker engine"):
        follow(block)
    assert time.monotonic() - began < 30
    assert containers(key) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"resources": Resources(gpus_per_node=1)}, "NVIDIA container toolkit"),
        ({"options": ContainerOptions(network="no-such-network")}, "option network"),
        ({"mounts": (Mount(source="/no/such/folder", target="/x"),)}, "make that folder"),
        ({"options": ContainerOptions(user="nobody-at-all")}, "option user"),
        ({"resources": Resources(memory_bytes_per_node=1000)}, "cpus or memory"),
        ({"options": ContainerOptions(devices=("/dev/nowhere",))}, "option devices"),
    ],
)
def test_a_refusal_of_the_engine_comes_with_advice(
    tmp_path: Path, key: str, image: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"the Docker engine refuses: .*{words}"):
        follow(job(tmp_path, key, image, "pass", **values))
    assert containers(key) == []


def test_a_program_that_the_image_does_not_have(tmp_path: Path, key: str, image: str) -> None:
    block = job(tmp_path, key, image, "", command=("no-such-program",))
    outcome = follow(block)[1]
    assert outcome.kind is Kind.CONFIG
    assert outcome.message == f"image {image} has no program no-such-program that can be run"
    without_init = ContainerOptions(pull="never", init=False)
    block = job(tmp_path, f"{key}-2", image, "", command=("no-such-program",), options=without_init)
    with pytest.raises(ConfigError, match="has no such program"):
        follow(block)
    assert containers(f"{key}-2") == []


def test_an_absent_engine_is_named(tmp_path: Path, key: str) -> None:
    options = ContainerOptions(engine=f"unix://{tmp_path}/no.sock")
    with pytest.raises(InfrastructureError, match=r"no\.sock does not answer.*DOCKER_HOST"):
        follow(job(tmp_path, key, "any", "pass", options=options))


def test_foreign_container_is_left_alone(tmp_path: Path, key: str, image: str) -> None:
    name = f"trainyard-job-{key}"
    docker("create", "--name", name, image, "true")
    try:
        with pytest.raises(ConfigError, match="was not made by trainyard"):
            follow(job(tmp_path, key, image, "pass"))
    finally:
        docker("rm", name)


# --- ended by others ------------------------------------------------------------------------------


def test_a_stage_over_its_memory_limit(tmp_path: Path, key: str, image: str) -> None:
    small = Resources(memory_bytes_per_node=64 << 20)
    outcome = follow(job(tmp_path, key, image, "x = bytearray(2**30)", resources=small))[1]
    assert (outcome.kind, outcome.is_retryable) == (Kind.OUT_OF_MEMORY, True)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("stop", "--time=10"), Kind.STOPPED),
        (("kill",), Kind.INFRASTRUCTURE),
        (("rm", "--force"), Kind.UNKNOWN),
    ],
)
def test_what_people_do_to_a_container(
    tmp_path: Path, key: str, image: str, arguments: tuple[str, ...], kind: Kind
) -> None:
    block = job(tmp_path, key, image, counting(), poll_seconds=0.2)

    async def meanwhile(run: ContainerJobRun) -> None:
        await until(lambda: "step 1\n" in text_of(block))
        await asyncio.to_thread(docker, *arguments, run.name)

    assert follow(block, meanwhile)[1].kind is kind


def test_time_limit_has_its_own_signal(tmp_path: Path, key: str, image: str) -> None:
    block = job(tmp_path, key, image, counting(), resources=Resources(time_limit_seconds=1))
    outcome = follow(block)[1]
    assert (outcome.kind, outcome.exit_status) == (Kind.TIME_LIMIT, 3)
    assert "stopped by SIGUSR1" in text_of(block)


def test_silent_container_is_ended_as_hung(tmp_path: Path, key: str, image: str) -> None:
    code = "import time; print('begun', flush=True); time.sleep(600)"
    block = job(tmp_path, key, image, code, hang_seconds=1.0, grace_seconds=5)
    assert follow(block)[1].kind is Kind.HANG
