"""A failed training names its last step in the terminal, in Prefect's logs and on its page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.yard.faults.faults import Server, in_one_attempt, training
from tests.yard.operator.deployed import Api
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Failed:
    """A training that failed, was tried again, and was given up."""

    output: str
    """In the terminal."""
    step: int
    """After which it failed each time, by its failure.json."""
    api: Api


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failed]:
    """One whose loss is soon no number: that may be a machine's fault, so it is tried again."""
    folder = tmp_path_factory.mktemp("yard")
    document = Path(training(folder, str(folder / "save"), 60))
    document.write_text(document.read_text().replace("lr = 1e-3", "lr = 1e30\nclip_grad = 0.0"))
    server = Server(folder / "home")
    try:
        given = {**server.environment, "TRAINYARD_CACHE": str(folder / "cache")}
        ended = in_one_attempt(Yard(folder, given), folder, str(document)).ends(180)
        assert ended.states("pretrain") == ["runs", "failed", "runs", "failed"], ended.output
        first, second = (json.loads(path.read_text()) for path in folder.rglob("failure.json"))
        assert first["step"] == second["step"] >= 1
        for failure in (first, second):
            assert f"step {first['step'] + 1}" in failure["message"]
        yield Failed(ended.output, first["step"], Api(server.url))
    finally:
        server.kill()


def test_the_terminal_shows_the_step_at_which_a_training_failed(failed: Failed) -> None:
    how = f"infrastructure after step {failed.step}"
    lines = [line for line in failed.output.splitlines() if "  pretrain  " in line and how in line]
    assert [line.rpartition("  ")[2] for line in lines] == [how, how]
    assert f"error: pretrain: {how}: step {failed.step + 1}" in failed.output


def test_so_does_the_page_of_the_stage(failed: Failed) -> None:
    pages = failed.api.ask("artifacts/filter", {})
    tables = [json.loads(one["data"]) for one in pages if one["key"] == "pretrain-stage"]
    steps = [row["value"] for rows in tables for row in rows if row["what"] == "last finished step"]
    assert steps == [str(failed.step)] * 2


def test_the_line_of_prefect_is_one_that_a_person_reads(failed: Failed) -> None:
    messages = [log["message"] for log in failed.api.ask("logs/filter", {})]
    (line,) = (text for text in messages if "Task run encountered an exception" in text)
    how = f"pretrain: infrastructure after step {failed.step}: step {failed.step + 1}"
    assert how in line
    assert len(line.splitlines()) == 1
    assert not any("StageError(" in text for text in (*messages, failed.output))
    assert not any("Task run failed" in text for text in messages)  # of the first attempt
