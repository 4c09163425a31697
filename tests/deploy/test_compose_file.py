"""docker-compose.yml as it is written: what compose itself makes of it needs no engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy import env
from flows.yard.read_profile import read_profile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"]).returncode:
        pytest.skip("no docker compose here")
    return tmp_path_factory.mktemp("compose")


@cache
def services(folder: Path, **chosen: str) -> dict[str, Any]:
    """The services that compose would start, with some settings given."""
    settings = env.settled({"YARD_HOME": "/srv/yard", **chosen})
    env.write(folder / "env", settings)
    command = ["docker", "compose", "--env-file", str(folder / "env"), "--profile", "*"]
    command += ["config", "--format", "json"]
    variables = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "root", "port"),
    [
        ({}, "s3://yard", "4201"),
        ({"YARD_BUCKET": "team", "YARD_BROWSE_PORT": "5001"}, "s3://team", "5001"),
        ({"YARD": "/srv/yard/made"}, "/srv/yard/made", "4201"),
    ],
)
def test_pages_link_to_the_service_that_shows_the_same_root(
    folder: Path, chosen: dict[str, str], root: str, port: str
) -> None:
    found = services(folder, **chosen)
    shown, worker = found["browse"], found["worker"]["environment"]
    assert shown["command"][shown["command"].index("--root") + 1] == root == worker["YARD"]
    assert worker["TRAINYARD_BROWSE"] == f"{root}=http://127.0.0.1:{port}"
    assert [(one["host_ip"], one["published"]) for one in shown["ports"]] == [("127.0.0.1", port)]


@pytest.mark.slow
def test_digest_cache_outlives_containers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = services(folder, YARD_HOME="/srv/yard")
    monkeypatch.setenv("YARD_HOME", "/srv/yard")
    profile = read_profile("compose")
    kept = profile.environment["TRAINYARD_DIGESTS"]
    mounts = [one.target for one in profile.mounts if not one.read_only]
    assert any(Path(kept).is_relative_to(target) for target in mounts)
    stages = {name: one for name, one in found.items() if "stages" in one.get("profiles", ())}
    assert len(stages) > 10
    for one in (*stages.values(), found["worker"], found["flow"]):
        assert one["environment"]["TRAINYARD_DIGESTS"] == kept
        held = [v["target"] for v in one["volumes"] if not v.get("read_only")]
        assert any(Path(kept).is_relative_to(target) for target in held)


@pytest.mark.slow
def test_a_stage_starts_nothing_else_and_services_wait_for_the_bucket(folder: Path) -> None:
    found = services(folder)
    stages = [one for one in found.values() if "stages" in one.get("profiles", ())]
    assert not [one for one in stages if one.get("depends_on")]
    assert all("bucket" in found[name]["depends_on"] for name in ("worker", "browse"))


@pytest.mark.slow
def test_what_shows_files_cannot_change_them(folder: Path) -> None:
    shown = services(folder)["browse"]
    assert [volume["read_only"] for volume in shown["volumes"]] == [True]
    assert (shown["read_only"], shown["cap_drop"]) == (True, ["ALL"])
    assert not {"PREFECT_API_AUTH_STRING", "POSTGRES_PASSWORD"} & shown["environment"].keys()


@pytest.mark.slow
def test_every_port_is_of_this_machine_alone(folder: Path) -> None:
    ports = [port for one in services(folder).values() for port in one.get("ports", ())]
    assert len(ports) == 3
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
