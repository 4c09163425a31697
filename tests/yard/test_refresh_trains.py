"""A corpus with news starts a training by itself: event, automation and run, on a whole server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.yard.operator.deployed import ENDED, WholeServer, comes, register, working
from tests.yard.yard import MODEL, Yard, write_corpus

pytestmark = [pytest.mark.yard, pytest.mark.timeout(900)]

PROFILE = """
deployments = ["corpus-refresh", "pretrain-gpt"]

[automations]
zombie_seconds = 0
train_on_new_corpus = "{folder}/web.toml"
"""

CORPUS = """
corpus = ["{folder}/arrivals/*.jsonl"]

[tokenize]
tokenizer_type = "HuggingFaceTokenizer"
tokenizer_model = "{folder}/tokenizer"
append_eod = true
"""

TRAINING = """
tokens = "{folder}/yard/news/current.json"
evaluation_data = "{folder}/held.txt"

[tokenize]
tokenizer_type = "HuggingFaceTokenizer"
tokenizer_model = "{folder}/tokenizer"

[plan]
vocab_size = 300
{model}"""


@pytest.fixture
def yard(tmp_path: Path, server: WholeServer) -> Yard:
    """A yard `nightly` with a tokenizer, a corpus that grows and a recipe that trains on it."""
    yard = Yard(tmp_path, {**server.environment, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    arrivals = tmp_path / "arrivals"
    arrivals.mkdir()
    write_corpus(arrivals / "a.jsonl", 120, seed=1)
    (tmp_path / "held.txt").write_text(
        "the words of the train shunts its own yard before dawn. " * 9
    )
    target = str(tmp_path / "tokenizer")
    arguments = ("--input", str(arrivals), "--output-dir", target, "--vocab-size", "300")
    made = yard.run("-m", "stages.train_tokenizer", *arguments)
    assert made.status == 0, made.err
    (tmp_path / "news.toml").write_text(CORPUS.format(folder=tmp_path))
    (tmp_path / "web.toml").write_text(TRAINING.format(folder=tmp_path, model=MODEL))
    for name in ("nightly", "elsewhere"):
        (tmp_path / f"{name}.toml").write_text(PROFILE.format(folder=tmp_path))
        register(yard, str(tmp_path / f"{name}.toml"))
    return yard


def refresh(yard: Yard) -> str:
    """Refresh the corpus with the profile of the yard; what the flow logs."""
    profile = ("--profile", str(yard.folder / "nightly.toml"))
    done = yard.run("-m", "flows.corpus_refresh", str(yard.folder / "news.toml"), *profile)
    assert done.status == 0, done.err
    return done.err


def trainings(server: WholeServer, yard: str) -> list[dict[str, Any]]:
    """The flow runs of pretrain-gpt in a yard."""
    deployment = server.ask(f"deployments/name/pretrain-gpt/{yard}")["id"]
    wanted = {"flow_runs": {"deployment_id": {"any_": [deployment]}}}
    return list(server.ask("flow_runs/filter", wanted))


@pytest.mark.full
def test_a_new_version_starts_one_training_on_it(server: WholeServer, yard: Yard) -> None:
    assert "merge" in refresh(yard)
    assert comes(60, lambda: trainings(server, "nightly"))
    assert "no new sources since" in refresh(yard)
    (training,) = trainings(server, "nightly")
    assert training["parameters"]["recipe"] == str(yard.folder / "web.toml")
    assert training["parameters"]["profile"] == "nightly"

    with working(yard, "nightly") as worker:
        assert comes(400, lambda: server.state(training["id"]) in ENDED), worker.output
    assert server.state(training["id"]) == "COMPLETED", worker.output
    pointer = json.loads((yard.folder / "yard" / "news" / "current.json").read_text())
    manifest = json.loads(
        (yard.folder / "yard" / "web" / "checkpoint" / "manifest.json").read_text()
    )
    assert pointer["version"] in json.dumps(manifest["inputs"])

    write_corpus(yard.folder / "arrivals" / "b.jsonl", 20, seed=2)
    refresh(yard)
    assert comes(60, lambda: len(trainings(server, "nightly")) == 2)
    assert trainings(server, "elsewhere") == []  # a corpus of another yard is no news there
