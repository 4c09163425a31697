"""What a real Prefect server holds for its pages after a flow in which training died once."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.yard.yard import COLLECTED, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

LONGER = COLLECTED.replace("train_iters = 6", "train_iters = 500\nlog_interval = 10").replace(
    "eval_iters = 1", "eval_iters = 1\nsave_interval = 50"
)
Page = dict[str, Any]


@pytest.fixture(scope="module")
def yard(
    tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str], module_cache: str
) -> Yard:
    """After a run in whose first attempt at training was killed."""
    found = Yard(tmp_path_factory.mktemp("pages"), {**prefect_api, "TRAINYARD_CACHE": module_cache})
    with found.start("-m", "flows.pretrain_gpt", found.recipe(LONGER)) as flow:
        os.kill(training_past(found, 100), signal.SIGKILL)
        _, err = flow.communicate(timeout=400)
    assert flow.returncode == 0, err
    return found


def training_past(yard: Yard, step: int) -> int:
    """The process of the stage, once its log tells of this step."""
    logs = yard.tiny / ".runs" / "pretrain"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for log in logs.glob("*/log.txt"):
            if re.search(rf"iteration +{step}/", log.read_text()):
                events = (log.parent / "events.jsonl").read_text().splitlines()
                return int(json.loads(events[0])["job"])
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in {logs}")


@pytest.fixture(scope="module")
def pages(yard: Yard, prefect_api: dict[str, str]) -> dict[str, Page]:
    """The newest of each name."""
    request = urllib.request.Request(
        f"{prefect_api['PREFECT_API_URL']}/artifacts/filter",
        data=json.dumps({"limit": 200, "sort": "CREATED_DESC"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found = json.loads(answer.read())
    ours = [page for page in found if page["key"]]
    return {page["key"]: page for page in reversed(ours)}


def test_each_stage_has_a_table_and_its_command(pages: dict[str, Page]) -> None:
    for job in ("plan", "tokenize-train-00000", "merge", "pretrain", "export", "report"):
        table = json.loads(pages[f"{job}-stage"]["data"])
        assert pages[f"{job}-stage"]["task_run_id"]
        assert {"output", "why it ran"} <= {row["what"] for row in table}, job
        assert "--config" in pages[f"{job}-script"]["data"]
    rows = {row["what"]: row for row in json.loads(pages["pretrain-stage"]["data"])}
    assert len(rows["input tokenizer"]["digest"]) == 12
    assert "metric lm_loss" in rows


def test_training_has_a_bar_that_came_to_its_end(pages: dict[str, Page]) -> None:
    assert pages["pretrain-progress"]["type"] == "progress"
    assert float(pages["pretrain-progress"]["data"]) == 100.0
    assert float(pages["pretrain-gpt-progress"]["data"]) == 100.0


def test_the_run_has_its_pictures_and_its_card(yard: Yard, pages: dict[str, Page]) -> None:
    assert pages["pretrain-gpt-loss"]["type"] == "image"
    assert pages["pretrain-gpt-loss"]["data"].startswith("data:image/svg+xml;base64,")
    lineage = pages["pretrain-gpt-lineage"]["data"]
    assert "data:image/svg+xml;base64," in lineage
    assert all(f"| {name} |" in lineage for name in ("pretrain", "merge", "evaluate"))
    assert (yard.tiny / "card.html").as_uri() in pages["pretrain-gpt-card"]["data"]
    assert "| `pretrain` | done |" in pages["pretrain-gpt-stages"]["data"]


def test_the_time_of_both_attempts_is_accounted_for(yard: Yard, pages: dict[str, Page]) -> None:
    kept = json.loads(Path(yard.tiny, "goodput", "pretrain.json").read_text())
    first, second = kept["attempts"]
    assert (first["ended"], second["ended"]) == ("infrastructure", "done")
    assert second["from_step"] >= 50
    assert first["spent"]["lost"] > 0
    assert round(sum(kept["spent_percent"].values()), 6) == 100.0
    assert f"**Goodput {100 * kept['goodput']:.1f} %**" in pages["pretrain-gpt-goodput"]["data"]
    assert "How much of it was training" in (yard.tiny / "card.html").read_text()
