"""A run that ended is not taken for a silent one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.yard.operator.deployed import ENDED, WholeServer, comes, register, working
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(300)]

BEAT, END = "prefect.flow-run.heartbeat", "prefect.flow-run.Failed"


def events_of(server: WholeServer, run: str) -> list[dict[str, Any]]:
    """The events of a flow run."""
    about = {"resource": {"id": [f"prefect.flow-run.{run}"]}}
    return list(server.ask("events/filter", {"filter": about, "limit": 50})["events"])


def has_end(server: WholeServer, run: str) -> bool:
    """Whether the server has stored the event of a run's end, some seconds after it."""
    return any(one["event"] == END for one in events_of(server, run))


def test_the_server_has_all_heartbeats_before_the_end(tmp_path: Path, server: WholeServer) -> None:
    yard = Yard(tmp_path, server.environment)
    register(yard, "local")
    with working(yard, "local", "ours", "--type", "process", program=["flows.worker"]) as worker:
        runs = [
            server.begin("run-stage/local", stage="plan", options="nonsense = 1") for _ in range(3)
        ]
        assert comes(200, lambda: all(server.state(one) in ENDED for one in runs)), worker.output
        assert {server.state(one) for one in runs} == {"FAILED"}
    for run in runs:
        assert comes(30, partial(has_end, server, run))
        events = events_of(server, run)
        beats = [one["received"] for one in events if one["event"] == BEAT]
        (end,) = [one["occurred"] for one in events if one["event"] == END]
        assert beats
        assert max(beats) < end
