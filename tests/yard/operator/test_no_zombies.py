"""A run that ended is not taken for a silent one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yard.operator.deployed import ENDED, WholeServer, comes, register, working
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(300)]

BEAT = "prefect.flow-run.heartbeat"


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
        about = {"resource": {"id": [f"prefect.flow-run.{run}"]}}
        events = server.ask("events/filter", {"filter": about, "limit": 50})["events"]
        beats = [one["received"] for one in events if one["event"] == BEAT]
        (end,) = [one["occurred"] for one in events if one["event"] == "prefect.flow-run.Failed"]
        assert beats
        assert max(beats) < end
