"""The log of a training is whole, in its run folder and in Prefect's pages, whatever dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.yard.faults.faults import Server, logs, steps, training, wait_for
from tests.yard.operator.deployed import Api, comes, register, working
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(400)]

ITERS = 1500
LAST = f"iteration {ITERS:8}/{ITERS:8}"


def pages_of(api: Api, run: str) -> str:
    """All lines that Prefect has of a run."""
    found: list[Any] = []
    query = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200}
    while part := api.ask("logs/filter", {**query, "offset": len(found)}):
        found += part
    return "\n".join(line["message"] for line in found)


def test_of_a_killed_worker_and_a_killed_server(tmp_path: Path, mortal: Server, yard: Yard) -> None:
    yard.environment["PREFECT_CLIENT_MAX_RETRIES"] = "1"  # Prefect gives up sooner
    register(yard, "local")
    save, api = tmp_path / "save", Api(mortal.url)
    document = training(tmp_path, str(save), ITERS)
    with working(yard, "local", "ours", "--type", "process") as worker:
        run = api.begin("run-stage/local", stage="pretrain", config=document)
        wait_for(lambda: steps(save))
        worker.process.kill()
        mortal.kill()
        before = steps(save)[-1]
        time.sleep(8)
        mortal.start()
        wait_for(lambda: LAST in logs(yard.folder), 200)
        assert steps(save)[-1] > before
        assert comes(60, lambda: api.state(run) == "COMPLETED"), api.state(run)
    text = pages_of(api, run)
    assert [n for n in range(10, ITERS + 1, 10) if f"iteration {n:8}/" not in text] == []
