"""A running training keeps its slot while the server is down or loses its lease."""

from __future__ import annotations

import signal
import time
import urllib.error
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from flows.server import ephemeral, leases
from flows.server.ephemeral import LEASE_SECONDS
from tests.yard.faults.faults import Server, in_training
from tests.yard.limited import LIMIT, limit_training, taken
from tests.yard.operator.deployed import Api, comes
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(400)]

LONG = 100_000
STORAGE = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the leases of those that outlive a flow; one training at a time may run."""
    assert STORAGE in ephemeral.SETTINGS
    monkeypatch.setitem(ephemeral.SETTINGS, STORAGE, leases.__name__)
    server = Server(tmp_path / "home")
    try:
        limit_training(server.url)
        yield server
    finally:
        server.kill()


def another_could_begin(server: Server) -> bool:
    """Whether the slot is free for a second training; takes it then."""
    asked = {"slots": 1, "names": [LIMIT], "mode": "concurrency", "lease_duration": 60}
    try:
        Api(server.url).ask("v2/concurrency_limits/increment-with-lease", asked)
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.LOCKED:
            raise
        return False
    return True


def test_slot_is_kept_over_a_long_outage(tmp_path: Path, mortal: Server, yard: Yard) -> None:
    flow = in_training(yard, tmp_path / "save", LONG)
    mortal.kill()
    time.sleep(LEASE_SECONDS + 20)
    mortal.start()
    assert not comes(LEASE_SECONDS + 30, lambda: another_could_begin(mortal))
    assert taken(mortal.url) == 1
    flow.process.send_signal(signal.SIGTERM)
    ended = flow.ends(60)
    assert ended.states("pretrain") == ["runs", "stopped"], ended.output
    assert "was lost" not in ended.output
    assert taken(mortal.url) == 0


def test_slot_with_a_forgotten_lease_is_kept(tmp_path: Path, mortal: Server, yard: Yard) -> None:
    flow, api = in_training(yard, tmp_path / "save", LONG), Api(mortal.url)
    held = tmp_path / "home" / "concurrency_leases"
    for lease in held.glob("*-*.json"):
        lease.unlink()
    api.ask(f"v2/concurrency_limits/{LIMIT}", {"active_slots": 0}, method="PATCH")
    assert comes(30, lambda: taken(mortal.url) == 1)
    (task,) = [run["id"] for run in api.ask("task_runs/filter", {})]
    there = api.ask(f"concurrency_limits/tag/{LIMIT.removeprefix('tag:')}")
    assert there["active_slots"] == [task]
    flow.process.send_signal(signal.SIGTERM)
    ended = flow.ends(60)
    assert f"that of {LIMIT} was lost while the server could not be reached" in ended.output
    assert "and taken again" in ended.output
    assert taken(mortal.url) == 0
