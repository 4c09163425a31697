"""Faults that are planted, each found by its name; and yards where there is nothing to find."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.doctor.engine import VERSION_LABEL
from flows.server.ephemeral import EphemeralServer
from tests.faulty_s3 import Faults, gateway
from tests.yard.container.containers import docker, running_engine
from tests.yard.operator.deployed import Api, WholeServer
from tests.yard.operator.doctor_visits import MAY_PASS, PROCESSES, WRONG_SETTING, Practice
from tests.yard.slurm.cluster import Cluster
from trainyard.version import VERSION

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

NAMESPACE = ("unshare", "--mount", "sh", "-c")
"""A private mount namespace."""


@pytest.fixture
def practice(tmp_path: Path) -> Practice:
    return Practice(tmp_path)


def test_a_sound_yard_passes(practice: Practice) -> None:
    seen = practice.visit()
    assert (seen.status, seen.ill()) == (0, set()), seen.findings
    for name in ("store", "conditional writes", "clock", "jobs", "image", "ranks", "disk", "text"):
        assert seen.findings[name]["state"] in ("ok", "warn"), seen.findings[name]
    assert "2 ranks" in seen.findings["ranks"]["told"]
    left = [path for path in (practice.folder / "yard").rglob("*") if path.is_file()]
    assert left == []


# --- faults, planted ----------------------------------------------------------------------------

SERVER = ("Prefect", "versions", "auth")
CONTAINERS = 'block = "container"\nimage = "trainyard/none:0"\n[container]\npull = "never"\n'
SILENT_SERVER = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}


def test_bad_store_and_no_server(practice: Practice, s3_url: str, s3_server: str) -> None:
    with gateway(s3_server, Faults(ignores_conditions=True, seconds_ahead=800)) as endpoint:
        environment = {"AWS_ENDPOINT_URL": endpoint, **SILENT_SERVER}
        seen = practice.visit(root=s3_url, environment=environment)
    assert seen.ill() == {"conditional writes", "clock", "Prefect"}
    assert seen.status == WRONG_SETTING
    assert "If-None-Match" in seen.message("conditional writes")
    assert "ahead of ours" in seen.message("clock")
    assert "http://127.0.0.1:9/api" in seen.message("Prefect")
    assert seen.findings["versions"]["told"] == "Prefect failed"


def test_wrong_credentials_and_no_engine(practice: Practice, s3_url: str, s3_server: str) -> None:
    with gateway(s3_server, Faults(knows_key="another")) as endpoint:
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "DOCKER_HOST": f"unix://{practice.folder}/no.sock",
        }
        seen = practice.visit(CONTAINERS, root=s3_url, environment=environment)
    assert seen.ill() == {"store", "jobs", "Prefect"}
    assert seen.status == WRONG_SETTING
    assert "AWS_ACCESS_KEY_ID" in seen.message("store")
    assert seen.findings["conditional writes"]["told"] == "store failed"
    assert "does not answer" in seen.message("jobs")
    assert seen.findings["image"]["told"] == seen.findings["ranks"]["told"] == "jobs failed"
    assert "PREFECT_API_URL is not set" in seen.message("Prefect")


def test_no_store_and_an_interpreter_without_trainyard(practice: Practice, s3_url: str) -> None:
    bare = practice.folder / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    profile = f'{PROCESSES}python = "{bare}"\n'
    environment = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    seen = practice.visit(profile, "store", "jobs", "image", root=s3_url, environment=environment)
    assert (seen.status, seen.ill()) == (WRONG_SETTING, {"store", "image"})
    assert "AWS_ENDPOINT_URL" in seen.message("store")
    assert seen.findings["store"]["seconds"] < 5
    assert "no trainyard" in seen.message("image")


def test_a_missing_bucket_is_reported(practice: Practice, s3_url: str) -> None:
    seen = practice.visit(PROCESSES, "store", root="s3://no-such-bucket-here/yard")
    assert (seen.status, seen.ill()) == (WRONG_SETTING, {"store"})
    assert "bucket does not exist" in seen.message("store")


@pytest.mark.full
def test_a_silent_store_does_not_hang_the_check(practice: Practice, s3_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        seen = practice.visit(PROCESSES, "store", "text", root=s3_url, environment=environment)
    assert (seen.status, seen.ill()) == (MAY_PASS, {"store"})
    assert "no answer within 12 s" in seen.message("store")
    assert seen.findings["store"]["seconds"] < 14


def test_a_server_without_authentication(practice: Practice, server: WholeServer) -> None:
    seen = practice.visit(CONTAINERS, *SERVER, "work pool", environment=server.environment)
    assert (seen.status, seen.ill()) == (WRONG_SETTING, {"auth", "work pool"})
    assert "PREFECT_SERVER_API_AUTH_STRING" in seen.message("auth")
    assert "flows.register" in seen.message("work pool")


@pytest.mark.full
def test_a_closed_server_accepts_credentials(practice: Practice) -> None:
    secret = "yard:of-a-test"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_CSRF_PROTECTION_ENABLED", "true")
        api = EphemeralServer(practice.folder / "server", password=secret)
    try:
        api.wait()
        here = dict(api.environment)
        seen = practice.visit(CONTAINERS, *SERVER, "slots", environment=here)
        assert (seen.status, seen.ill()) == (0, set()), seen.findings
        assert "no limit of yard profile is registered" in seen.findings["slots"]["told"]
        assert "CSRF protection is on" in seen.findings["auth"]["told"]
        here["PREFECT_API_AUTH_STRING"] = "yard:wrong"
        seen = practice.visit(CONTAINERS, *SERVER, environment=here)
    finally:
        api.stop()
    assert (seen.status, seen.ill()) == (WRONG_SETTING, {"versions"})
    assert "PREFECT_API_AUTH_STRING" in seen.message("versions")


HASTY = (
    "import datetime, sys, flows.doctor.flow_schedules as schedules;"
    "schedules.NEW = datetime.timedelta(0);"
    "from flows.doctor.command import main; sys.exit(main())"
)
"""Doctor that gives a scheduler no time."""


def test_idle_scheduler_and_no_worker(practice: Practice, prefect_api: dict[str, str]) -> None:
    """A flow's own server has no scheduler."""
    api = Api(prefect_api["PREFECT_API_URL"])
    flow = api.ask("flows/", {"name": "nightly"})["id"]
    api.ask("work_pools/", {"name": "nobody", "type": "process"})
    offered = {"name": "profile", "flow_id": flow, "work_pool_name": "nobody"}
    daily = {"active": True, "schedule": {"cron": "0 3 * * *"}}
    made = api.ask("deployments/", {**offered, "schedules": [daily]})["id"]
    try:
        due = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2026-01-01T03:00:00Z"}}
        api.ask(f"deployments/{made}/create_flow_run", {"state": due})
        checks = ("Prefect", "versions", "schedules")
        program = ("-c", HASTY)
        seen = practice.visit(PROCESSES, *checks, environment=prefect_api, program=program)
    finally:
        api.ask(f"deployments/{made}", method="DELETE")
    assert (seen.status, seen.ill()) == (MAY_PASS, {"schedules"})
    message = seen.message("schedules")
    assert "nightly/profile has an active schedule and no planned run" in message
    assert "late runs of nightly/profile: 1, the oldest by " in message
    assert (
        "(due 2026-01-01 03:00 UTC): no worker polls queue default of work pool nobody" in message
    )
    assert "python -m flows.worker --pool nobody" in message


def test_an_image_that_is_not_there(practice: Practice) -> None:
    with running_engine():
        seen = practice.visit(CONTAINERS, "jobs", "image")
    assert (seen.status, seen.ill()) == (WRONG_SETTING, {"image"})
    assert "trainyard/none:0" in seen.message("image")


@contextmanager
def labelled(image: str, version: str) -> Iterator[str]:
    """An image like another that says it is of some version; its name."""
    name = f"trainyard-doctor-{os.getpid()}:{version}"
    text = f"FROM {image}\nLABEL {VERSION_LABEL}={version}\n"
    build = ["docker", "build", "--quiet", "--tag", name, "-"]
    subprocess.run(build, input=text, text=True, check=True, stdout=subprocess.PIPE)
    try:
        yield name
    finally:
        docker("rmi", name)


def test_image_of_another_version_and_one_that_fails(practice: Practice) -> None:
    """The second bears our version, and has a Python and no trainyard."""

    def profile(image: str) -> str:
        return CONTAINERS.replace("trainyard/none:0", image)

    with running_engine() as python:
        with labelled(python, "0.0.1") as old:
            seen = practice.visit(profile(old), "jobs", "image")
        assert (seen.status, seen.ill()) == (WRONG_SETTING, {"image"})
        assert f"image {old} is of version 0.0.1, the flows are of {VERSION}" in seen.message(
            "image"
        )
        with labelled(python, VERSION) as bare:
            seen = practice.visit(profile(bare), "jobs", "image")
        assert (seen.status, seen.ill()) == (WRONG_SETTING, {"image"})
        assert f"image {bare}: stage " in seen.message("image")
        assert "does not start in it: status 1: " in seen.message("image")
        assert "No module named" in seen.message("image")


def test_a_machine_with_all_that_a_machine_can_have(practice: Practice) -> None:
    if os.geteuid() != 0 or shutil.which("nvidia-smi"):
        pytest.skip("mounting takes root; and this machine is to have no GPU")
    full = practice.folder / "full"
    full.mkdir()
    script = (
        "mount -t tmpfs -o size=64m none /dev/shm && "
        f"mount -t tmpfs -o size=2m none {full} && mkdir {full}/runs && "
        f"head -c 2M /dev/zero >{full}/fill; "
        'ulimit -n 256; exec "$@"'
    )
    checks = ("disk", "shared memory", "limits", "text", "GPUs")
    profile = f'{PROCESSES}run_folder = "{full}/runs"\n[resources]\ngpus_per_node = 8\n'
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    within = (*NAMESPACE, script)
    seen = practice.visit(profile, *checks, environment=environment, within=within)
    assert (seen.status, seen.ill()) == (WRONG_SETTING, set(checks))
    assert f"runs {full}/runs: cannot be written to (No space left" in seen.message("disk")
    assert "flows.gc" in seen.message("disk")
    assert "64 MiB free in /dev/shm" in seen.message("shared memory")
    assert "nofile 256" in seen.message("limits")
    assert "C.UTF-8" in seen.message("text")
    assert "8 GPUs" in seen.message("GPUs")


@pytest.mark.full
def test_missing_partition_and_ranks_on_two_nodes(practice: Practice, cluster: Cluster) -> None:
    here = {"SLURM_CONF": os.environ["SLURM_CONF"]}
    slurm = f'block = "slurm"\npython = "{sys.executable}"\n[resources.pretrain]\nnodes = 2\n'
    wrong = f'{slurm}[slurm]\npartition = "h100"\n'
    seen = practice.visit(wrong, "jobs", "ranks", environment=here)
    assert (seen.status, seen.ill()) == (WRONG_SETTING, {"jobs"})
    assert "h100" in seen.message("jobs")
    seen = practice.visit(slurm, "jobs", "ranks", "limits", environment=here, more=["--submit"])
    assert seen.status == 0, seen.findings
    assert "2 ranks on node1, node2 over gloo" in seen.findings["ranks"]["told"]
    assert "on node" in seen.findings["limits"]["told"]
