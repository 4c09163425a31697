"""A browser sees why a run failed, and what a waiting run waits for; tables fit the page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.cli.run_flow import ENVIRONMENT
from flows.pages.charts import lineage_page
from flows.pages.run_pages import stage_table
from flows.recipes.summary import Summary
from flows.runner.run_lock import LOCK_FILE
from flows.runner.wait_state import LOCK
from flows.server.home import PASSWORD, URL
from stages.report.lineage import Artifact, Lineage
from tests.security.attacks import Target
from tests.security.servers import ui_server
from tests.yard.operator.browser import GENERATIONS, browser_page
from tests.yard.operator.deployed import Api, comes
from tests.yard.yard import Yard
from trainyard.artifacts.claim import acquire

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(300)]

BROKEN = """
corpus = ["{folder}/broken.jsonl"]
evaluation_data = "{folder}/broken.jsonl"

[train_tokenizer]
vocab_size = 300
"""
TOP_PIXELS = 60
"""Where the heading of a page ends."""
LONG = "s3://bucket/of/a/long/name/" + "folder/" * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The server of `make ui`."""
    folder = tmp_path_factory.mktemp("waits")
    with (folder / "server.log").open("w") as log, ui_server(folder / "yard", log) as server:
        yield server


@pytest.fixture
def yard(tmp_path: Path, server: Target) -> Yard:
    given = {URL: f"{server.url}/api", PASSWORD: server.password, **ENVIRONMENT}
    cache = {"TRAINYARD_CACHE": str(tmp_path / "cache"), "PREFECT_HOME": str(tmp_path / "client")}
    return Yard(tmp_path, {**given, **cache})


def test_the_reason_of_a_failure_and_of_a_wait_is_seen(server: Target, yard: Yard) -> None:
    api = Api(f"{server.url}/api", server.password)
    (yard.folder / "broken.jsonl").write_text("no document\n" * 9)
    recipe = yard.recipe(BROKEN.format(folder=yard.folder))
    held = acquire(str(yard.tiny / LOCK_FILE), 0)
    with yard.start("-m", "flows.prepare_corpus", recipe) as flow, browser_page(server) as page:
        runs = lambda: api.ask("flow_runs/filter", {})  # noqa: E731
        assert comes(90, lambda: [one["state"]["name"] for one in runs()] == [LOCK])
        (run,) = runs()
        assert "another flow run works on" in run["state"]["message"]
        for prefix in GENERATIONS.values():
            page.goto(f"{server.url}{prefix}/runs/flow-run/{run['id']}")
            page.get_by_text(LOCK, exact=True).first.wait_for()
        held.release()
        flow.communicate(timeout=200)
        (run,) = runs()
        assert run["run_count"] == 1  # automations restart a run only a few times
        assert (run["state_type"], run["state"]["message"][:16]) == ("FAILED", "train_tokenizer:")
        assert re.fullmatch(r"tiny \d\d-\d\d \d\d:\d\d: train_tokenizer: fault in .*", run["name"])
        for prefix in GENERATIONS.values():
            page.goto(f"{server.url}{prefix}/runs/flow-run/{run['id']}")
            reason = page.get_by_text(": train_tokenizer: fault in the data").first
            reason.wait_for()
            assert reason.bounding_box()["y"] < TOP_PIXELS
        found = {one["key"]: one for one in api.of_run("artifacts", run["id"])}
        for name in ("failure", "stages"):
            assert found[f"prepare-corpus-{name}"]["data"].startswith(
                "**Failed:** train\\_tokenizer"
            )
        page.goto(f"{server.url}/v2/runs/flow-run/{run['id']}?tab=Artifacts")
        page.get_by_text("prepare-corpus-failure").first.wait_for()


def pages() -> dict[str, str]:
    """Tables with long names."""
    summaries = [
        Summary(
            job=f"tokenize-{number:05}-of-a-name",
            stage="tokenize",
            reused=False,
            reason=f"--input changed ({LONG} -> {LONG})",
            seconds=12345.6,
            output_digest="0123456789abcdef",
            metrics={"documents": 1234567, "bad_lines": 123, "tokens": 12345678901},
        )
        for number in range(3)
    ]
    names = ("tokenize", "merge", "pretrain", "evaluate")
    artifacts = [
        Artifact(
            key=f"{LONG}{name}",
            stage=name,
            digest="0123456789abcdef",
            size_bytes=1234567,
            seconds=98765.4,
        )
        for name in names
    ]
    edges = [(f"{LONG}{a}", f"{LONG}{b}") for a, b in pairwise(names)]
    lineage = Lineage(artifacts=tuple(artifacts), edges=tuple(edges), destination=f"{LONG}pretrain")
    return {"stages": stage_table(summaries), "lineage": lineage_page(lineage)}


def test_tables_fit_a_page(server: Target) -> None:
    settings = {PREFECT_API_URL: f"{server.url}/api", PREFECT_API_AUTH_STRING: server.password}

    async def create(text: str) -> str:
        async with get_client() as client:
            made = await client.create_artifact(ArtifactCreate(type="markdown", data=text))
            return str(made.id)

    with temporary_settings(settings):
        artifacts = {name: asyncio.run(create(text)) for name, text in pages().items()}
    with browser_page(server) as page:
        for name, artifact in artifacts.items():
            for prefix in GENERATIONS.values():
                page.goto(f"{server.url}{prefix}/artifacts/artifact/{artifact}")
                table = page.locator("table").first
                table.wait_for()
                hidden = table.evaluate(HIDDEN)
                assert hidden <= 0, (name, prefix, hidden)


HIDDEN = """table => {
  let room = table.parentElement;
  while (room.clientWidth === 0) room = room.parentElement;
  return table.getBoundingClientRect().right - room.getBoundingClientRect().right;
}"""
"""Pixels of a table beyond the element that holds it."""
