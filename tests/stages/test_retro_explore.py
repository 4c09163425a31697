"""Calls from a prompt or a pipe: looked up, never evaluated."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from stages.retro_explore import run as module
from stages.retro_explore.calls import call, methods, shown
from stages.retro_explore.config import RetroExploreConfig
from stages.runtime.context import StageRun
from tests.trainyard.retrieval.projects import MadeProject, make_project
from trainyard.errors import ConfigError
from trainyard.retrieval.retro import USAGE, Retro


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeProject:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def opened(made: MadeProject) -> Retro:
    return Retro.open(made.project.url)


@pytest.mark.parametrize(
    "line",
    [
        "get_neighbor_tokens 2 1 train",
        "get_neighbor_tokens 2 1",
        "get_neighbor_tokens(2, 1)",
        "retro.get_neighbor_tokens(2, 1, 'train')",
        '  get_neighbor_tokens 2, 1, "train"  ',
    ],
)
def test_a_call_is_words_or_python(opened: Retro, line: str) -> None:
    expected = opened.get_neighbor_tokens(2, 1)
    found = json.loads(shown(call(opened, line)))
    assert found == {name: tokens.tolist() for name, tokens in expected.items()}


def test_tokens_and_text_are_taken_whole(opened: Retro) -> None:
    assert call(opened, "gpt_to_text [104, 105]") == call(opened, "gpt_to_text 104 105") == "hi"
    assert shown(call(opened, "text_to_bert of, words")) == shown(opened.text_to_bert("of, words"))
    assert shown(call(opened, "text_to_bert('a b')")) == shown(opened.text_to_bert("a b"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("get_db_chunk_txt 1", "unknown call 'get_db_chunk_txt'; did you mean 'get_db_chunk_text'"),
        ("get_db_chunk_text", "get_db_chunk_text takes idx; 0 were given"),
        ("get_db_num_chunks 1", "get_db_num_chunks takes no arguments; 1 were given"),
        ("get_db_chunk_text one", "get_db_chunk_text: 'one' is not a whole number"),
        ("get_pt_sample 'train 0", "has an open quote"),
        ("open /etc", "unknown call 'open'"),
        ("__init__ x", "unknown call '__init__'"),
        ("1 + 1", "is no call; an example: get_db_chunk_text 0"),
        ("__import__('os').system('false')", "unknown call '__import__'"),
    ],
)
def test_nothing_else_is_run(opened: Retro, line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        call(opened, line)


def test_every_call_is_in_the_usage() -> None:
    assert [name for name in methods() if f"{name}(" not in USAGE] == []


def explore(
    made: MadeProject, monkeypatch: pytest.MonkeyPatch, text: str, *, at_prompt: bool
) -> None:
    stdin: Any = io.StringIO(text)
    stdin.isatty = lambda: at_prompt
    monkeypatch.setattr(sys, "stdin", stdin)
    config = RetroExploreConfig(project=made.project.url)
    assert module.run(config, StageRun("retro_explore", {}, None)) == {}


def test_a_pipe_gets_the_results_alone_and_ends_at_a_mistake(
    made: MadeProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    explore(made, monkeypatch, "get_db_num_indexed_datasets\n\ngpt_to_text 104\n", at_prompt=False)
    assert capsys.readouterr().out == "2\nh\n"
    with pytest.raises(ConfigError, match="chunk 999999 of"):
        explore(made, monkeypatch, "get_db_chunk_text 999999\n", at_prompt=False)


def test_a_prompt_explains_a_mistake_and_goes_on(
    made: MadeProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "get_db_chunk_text 999999\nget_pt_sample x 0\ngpt_to_text 104\nquit\ngpt_to_text 105\n"
    explore(made, monkeypatch, lines, at_prompt=True)
    out = capsys.readouterr().out
    assert out.startswith(USAGE)
    answers = out.removeprefix(USAGE).split("retro> ")
    assert answers[1].startswith("chunk 999999 of ")
    assert answers[2].startswith("split 'x':")
    assert answers[3:] == ["h\n", ""]
