"""Flows that are started without a server, and what they meet at a server that says no."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows import disks
from tests.flows.disks import fill
from tests.yard.faults.faults import (
    Flow,
    Server,
    in_one_attempt,
    in_training,
    logs,
    plan,
    start_stage,
    steps,
    training,
    wait_for,
)
from tests.yard.operator.deployed import WholeServer
from tests.yard.server_logs import break_on_purpose
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_flows_at_once_in_a_fresh_yard(tmp_path: Path, number: int) -> None:
    yard = Yard(tmp_path, {"TRAINYARD_CACHE": str(tmp_path / "cache")})
    document = plan(tmp_path, str(tmp_path / "plan"))
    flows = [start_stage(yard, "plan", document) for _ in range(2)]
    ended = [flow.ends(180) for flow in flows]
    assert [each.status for each in ended] == [0, 0], ended
    assert sorted(each.states("plan")[-1] for each in ended) == ["done", "reused"]
    assert yard.wait_until_empty(15) == []


PASSWORD = "admin:right"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """A server that asks for a password."""
    server = WholeServer(tmp_path_factory.mktemp("server"), PASSWORD)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("given", ["", "admin:wrong"])
def test_refused_flow_names_the_variable(tmp_path: Path, closed: WholeServer, given: str) -> None:
    yard = Yard(tmp_path, closed.environment)
    if given:
        yard.environment["PREFECT_API_AUTH_STRING"] = given
    ended = start_stage(yard, "plan", plan(tmp_path, str(tmp_path / "plan"))).ends()
    assert ended.status == 2, ended.output
    assert f"error: {closed.url} refuses: 401; set PREFECT_API_AUTH_STRING" in ended.output
    assert "Traceback" not in ended.output
    assert ended.seconds < 30


# --- servers that cannot serve --------------------------------------------------------------------

STOP_SECONDS = 30


@pytest.fixture
def broken(tmp_path: Path, mortal: Server) -> Iterator[tuple[Yard, Flow]]:
    """A training whose server answers 500 to every request: its tables are gone."""
    given = {"TRAINYARD_CACHE": str(tmp_path / "cache"), **mortal.environment}
    yard = Yard(tmp_path, given)
    flow = in_training(yard, tmp_path / "save", 100_000)
    break_on_purpose(tmp_path / "home")
    (file,) = (tmp_path / "home").glob("*.db")
    with sqlite3.connect(file, timeout=60, isolation_level=None) as database:
        for table in ("flow_run", "flow_run_state", "task_run", "artifact", "log"):
            database.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    try:
        yield yard, flow
    finally:
        flow.process.kill()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it(tmp_path: Path, broken: tuple[Yard, Flow], number: signal.Signals) -> None:
    yard, flow = broken
    time.sleep(5)  # calls that are tried again are on their way
    signalled_at = time.monotonic()
    flow.process.send_signal(number)
    ended = flow.ends(STOP_SECONDS)
    assert time.monotonic() - signalled_at < STOP_SECONDS
    assert ended.status == 128 + number, ended.output
    assert f"stopped by {number.name}" in ended.output
    assert "Traceback" not in ended.output
    assert "saved step" in logs(tmp_path)
    assert yard.wait_until_empty(15) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that a yard's Prefect alone fills by half."""
    with disks.small_disk(tmp_path / "disk", "10m", 10_000) as folder:
        yield folder


def on(small: Path, folder: Path) -> Yard:
    """A yard with everything of it on a disk."""
    return Yard(small, {"TRAINYARD_CACHE": str(folder / "cache")})


@pytest.mark.full
def test_a_full_disk_ends_a_flow_until_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    yard = on(small_disk, tmp_path)
    document = training(tmp_path, str(small_disk / "save"), 100_000)
    flow = in_one_attempt(yard, tmp_path, document)
    wait_for(lambda: steps(small_disk / "save"))
    filler = fill(small_disk)
    ended = flow.ends(150)
    assert ended.status == 3, ended.output
    assert "No space left on device" in ended.output
    assert "error: " in ended.output
    assert "Traceback" not in ended.output
    assert yard.wait_until_empty(15) == []
    filler.unlink()
    reached = steps(small_disk / "save")[-1]
    document = training(tmp_path, str(small_disk / "save"), reached + 20)
    assert start_stage(yard, "pretrain", document).ends().status == 0


@pytest.mark.full
def test_a_signal_ends_a_flow_whose_disk_is_full(tmp_path: Path, small_disk: Path) -> None:
    yard = on(small_disk, tmp_path)
    flow = start_stage(yard, "pretrain", training(tmp_path, str(tmp_path / "save"), 100_000))
    wait_for(lambda: steps(tmp_path / "save"))
    fill(small_disk)
    time.sleep(5)
    flow.process.send_signal(signal.SIGTERM)
    ended = flow.ends(STOP_SECONDS)
    assert ended.status == 128 + signal.SIGTERM, ended.output
    assert "stopped by SIGTERM" in ended.output
    assert yard.wait_until_empty(15) == []


def test_a_disk_full_before_the_start_is_reported(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk)
    ended = start_stage(
        on(small_disk, tmp_path), "plan", plan(tmp_path, str(tmp_path / "p"))
    ).ends()
    assert ended.status == 3, ended.output
    assert str(small_disk / "yard" / ".prefect") in ended.output
    assert "No space left on device" in ended.output or "is full" in ended.output
    assert "Traceback" not in ended.output
    assert ended.seconds < 60
