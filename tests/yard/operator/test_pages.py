"""What a real Prefect server holds for its pages after a flow in which training died once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.yard.operator.deployed import Api
from tests.yard.yard import COLLECTED, ROOT, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

LONGER = COLLECTED.replace("train_iters = 6", "train_iters = 500\nlog_interval = 10").replace(
    "eval_iters = 1", "eval_iters = 1\nsave_interval = 50"
)
Page = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "yard").mkdir()
    return folder


@pytest.fixture(scope="module")
def browsed(folder: Path) -> Iterator[str]:
    """Where a browser finds the files of the yard, as with `make ui`."""
    command = [sys.executable, "-m", "flows.browse", "--root", str(folder / "yard"), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1].rstrip("/")
        process.terminate()


@pytest.fixture(scope="module")
def yard(folder: Path, browsed: str, prefect_api: dict[str, str], module_cache: str) -> Yard:
    """After a run in whose first attempt at training was killed."""
    port = browsed.rpartition(":")[2]
    more = {"TRAINYARD_CACHE": module_cache, "BROWSE_PORT": port}
    found = Yard(folder, {**prefect_api, **more})
    with found.start("-m", "flows.pretrain_gpt", found.recipe(LONGER)) as flow:
        os.kill(training_past(found, 100), signal.SIGKILL)
        _, err = flow.communicate(timeout=400)
    assert flow.returncode == 0, err
    return found


def training_past(yard: Yard, step: int) -> int:
    """The process of the stage, once its log has this step."""
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
def versions(yard: Yard, prefect_api: dict[str, str]) -> list[Page]:
    """Every page that was made, the newest first."""
    asked = {"limit": 200, "sort": "CREATED_DESC"}
    found: list[Page] = Api(prefect_api["PREFECT_API_URL"]).ask("artifacts/filter", asked)
    return [page for page in found if page["key"]]


@pytest.fixture(scope="module")
def pages(versions: list[Page]) -> dict[str, Page]:
    """The newest of each name."""
    return {page["key"]: page for page in reversed(versions)}


def test_each_stage_has_a_table_and_its_command(pages: dict[str, Page]) -> None:
    for job in ("plan", "tokenize-train-00000", "merge", "pretrain", "export", "report"):
        table = json.loads(pages[f"{job}-stage"]["data"])
        assert pages[f"{job}-stage"]["task_run_id"]
        assert {"output", "why it ran"} <= {row["what"] for row in table}, job
        assert "--config" in pages[f"{job}-script"]["data"]
    rows = {row["what"]: row for row in json.loads(pages["pretrain-stage"]["data"])}
    assert len(rows["input tokenizer"]["digest"]) == 12
    assert "metric lm_loss" in rows


def test_the_attempt_that_died_has_a_table_as_well(yard: Yard, versions: list[Page]) -> None:
    # The newest two: tests of other files made pages on the same server before.
    done, died = [page for page in versions if page["key"] == "pretrain-stage"][:2]
    assert (done["description"], died["description"]) == (
        "Stage `pretrain`: done",
        "Stage `pretrain`: failed, infrastructure",
    )
    rows = {row["what"]: row["value"] for row in json.loads(died["data"])}
    assert rows["stage pretrain"].startswith("failed after ")
    assert "killed by SIGKILL" in rows["message"]
    assert Path(rows["log"]).is_relative_to(yard.tiny / ".runs" / "pretrain")


def test_training_has_a_bar_that_came_to_its_end(pages: dict[str, Page]) -> None:
    assert pages["pretrain-progress"]["type"] == "progress"
    assert float(pages["pretrain-progress"]["data"]) == 100.0
    assert float(pages["pretrain-gpt-progress"]["data"]) == 100.0


def test_the_run_has_its_pictures(pages: dict[str, Page]) -> None:
    assert pages["pretrain-gpt-loss"]["type"] == "image"
    assert pages["pretrain-gpt-loss"]["data"].startswith("data:image/svg+xml;base64,")
    lineage = pages["pretrain-gpt-lineage"]["data"]
    assert "data:image/svg+xml;base64," in lineage
    assert all(f"| {name} |" in lineage for name in ("pretrain", "merge", "evaluate"))
    assert "| `pretrain` | done |" in pages["pretrain-gpt-stages"]["data"]


def test_a_browser_can_follow_the_link(yard: Yard, browsed: str, pages: dict[str, Page]) -> None:
    link = re.findall(r"\((http.*?)\)", pages["pretrain-gpt-card"]["data"])[0]
    assert link == f"{browsed}/tiny/card.html"
    with urllib.request.urlopen(link, timeout=30) as answer:
        assert answer.read() == (yard.tiny / "card.html").read_bytes()


def test_the_time_of_both_attempts_is_accounted_for(yard: Yard, pages: dict[str, Page]) -> None:
    kept = json.loads(Path(yard.tiny, "goodput", "pretrain.json").read_text())
    first, second = kept["attempts"]
    assert (first["ended"], second["ended"]) == ("infrastructure", "done")
    assert second["from_step"] >= 50
    assert first["spent"]["lost"] > 0
    assert round(sum(kept["spent_percent"].values()), 6) == 100.0
    assert f"**Goodput {100 * kept['goodput']:.1f} %**" in pages["pretrain-gpt-goodput"]["data"]
    assert "How much of it was training" in (yard.tiny / "card.html").read_text()
