"""Schedules of seconds refresh a grown corpus through a worker, on every backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.server.home import PASSWORD, URL
from tests.security.attacks import Target
from tests.security.servers import ui_server
from tests.yard.kubernetes.kube import profile_on_pods
from tests.yard.operator.deployed import Api, register, working
from tests.yard.operator.scheduled import ARRIVALS, OFFERED, ONE_AT_A_TIME, every, first_of, pause
from tests.yard.slurm.cluster import profile_on_two_nodes
from tests.yard.yard import Yard, write_corpus

pytestmark = [pytest.mark.yard, pytest.mark.timeout(240)]

SECONDS = 90
"""From a worker's start to the end of the first run."""


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The server of `make ui`, with its log where those of all servers are looked for."""
    folder = tmp_path_factory.mktemp("ui")
    with (folder / "server.log").open("w") as log, ui_server(folder / "yard", log) as server:
        yield server


def profile_on(name: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The profile of a yard on a backend."""
    if name == "slurm":
        request.getfixturevalue("cluster")
        return profile_on_two_nodes(folder, OFFERED)
    if name == "kubernetes":
        return OFFERED + profile_on_pods(request.getfixturevalue("fake"), folder)
    return f'{OFFERED}block = "process"\n'


@pytest.mark.parametrize("name", ["processes", "slurm", "kubernetes"])
def test_schedule_refreshes_a_corpus(
    request: pytest.FixtureRequest, tmp_path: Path, ui: Target, name: str
) -> None:
    (tmp_path / "arrivals").mkdir()
    write_corpus(tmp_path / "arrivals" / "a.jsonl", 20, seed=1)
    server = Api(f"{ui.url}/api", ui.password)
    given = {"TRAINYARD_CACHE": str(tmp_path / "cache"), "PREFECT_HOME": str(tmp_path / "client")}
    yard = Yard(tmp_path, {URL: server.url, PASSWORD: ui.password, **given})
    recipe = yard.recipe(ARRIVALS.format(folder=tmp_path))
    profile = tmp_path / f"{name}.toml"
    text = profile_on(name, request, tmp_path)
    schedule = every(5, recipe=recipe, yard=str(tmp_path / "yard"))
    profile.write_text(text + ONE_AT_A_TIME + schedule)
    yard.environment |= {k: v for k, v in os.environ.items() if k == "SLURM_CONF"}
    register(yard, str(profile))
    with working(yard, name) as worker:
        run = first_of(server, f"corpus-refresh/{name}", SECONDS)
        pause(server, f"corpus-refresh/{name}")
    assert run is not None, f"nothing started by itself: {worker.output}"
    assert (run["state_type"], run["auto_scheduled"]) == ("COMPLETED", True), worker.output
    assert (tmp_path / "yard" / "tiny" / "current.json").exists()
