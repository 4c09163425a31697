"""A corpus and a tokenizer of one's own, and what a change to them makes be done again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.yard.yard import MODEL, Ended, Yard, write_corpus

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(900)]


def recipe(folder: Path) -> str:
    return f"""
corpus = ["{folder}/docs/*.jsonl"]
evaluation_data = "{folder}/held.txt"

[tokenize]
tokenizer_type = "HuggingFaceTokenizer"
tokenizer_model = "{folder}/tokenizer"
append_eod = true

[plan]
vocab_size = 300
{MODEL}"""


@pytest.fixture(scope="module")
def yard(
    tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str], module_cache: str
) -> Yard:
    folder = tmp_path_factory.mktemp("own")
    yard = Yard(folder, {**prefect_api, "TRAINYARD_CACHE": module_cache})
    (folder / "docs").mkdir()
    write_corpus(folder / "docs" / "a.jsonl", 60, seed=1)
    write_corpus(folder / "docs" / "b.jsonl", 60, seed=2)
    (folder / "held.txt").write_text("the words of the train shunts its own yard before dawn. " * 9)
    source, target = str(folder / "docs"), str(folder / "tokenizer")
    arguments = ("--input", source, "--output-dir", target, "--vocab-size", "300")
    made = yard.run("-m", "stages.train_tokenizer", *arguments)
    assert made.status == 0, made.err
    return yard


@pytest.fixture(scope="module")
def first(yard: Yard) -> Ended:
    return yard.pretrain(yard.recipe(recipe(yard.folder)))


BEHIND = ("merge", "pretrain", "export", "reshard", "evaluate", "benchmark", "report")


def test_files_of_ones_own_take_the_place_of_collect(first: Ended) -> None:
    assert first.status == 0, first.err
    expected = {"plan", "tokenize-a", "tokenize-b", *BEHIND}
    assert first.states() == dict.fromkeys(expected, "done")


@pytest.mark.usefixtures("first")
def test_checkpoints_elsewhere_are_read_there_by_what_follows(yard: Yard) -> None:
    elsewhere = yard.folder / "checkpoints"
    given = f'[pretrain]\nsave = "{elsewhere}"\nseed = 7'  # other weights: nothing is reused
    text = recipe(yard.folder).replace("[pretrain]", given)
    moved = yard.pretrain(yard.recipe(text))
    assert moved.status == 0, moved.err
    before = dict.fromkeys(("plan", "tokenize-a", "tokenize-b", "merge"), "reused")
    assert moved.states() == {**before, **dict.fromkeys(BEHIND[1:], "done")}
    assert (elsewhere / "manifest.json").is_file()


@pytest.mark.usefixtures("first")
def test_one_document_more_runs_what_depends_on_it_and_says_why(yard: Yard) -> None:
    with (yard.folder / "docs" / "b.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more train before dawn"}) + "\n")
    again = yard.pretrain(yard.recipe(recipe(yard.folder)))
    assert again.status == 0, again.err
    behind = dict.fromkeys(("tokenize-b", *BEHIND), "done")
    assert again.states() == {"plan": "reused", "tokenize-a": "reused", **behind}
    notes = again.notes()
    assert "b.jsonl" in notes["tokenize-b"]
    for stage in behind:
        assert "changed" in notes[stage], (stage, notes[stage])


@pytest.mark.usefixtures("first")
def test_tokens_of_a_removed_file_are_removed(yard: Yard) -> None:
    extra = yard.folder / "docs" / "c.jsonl"
    write_corpus(extra, 5, seed=3)
    document = yard.recipe(recipe(yard.folder))
    assert yard.pretrain(document).states()["tokenize-c"] == "done"
    extra.unlink()
    ended = yard.pretrain(document)
    assert ended.status == 0, ended.err
    assert ended.states()["merge"] == "done"
    assert "removed" in ended.err
    assert not list((yard.tiny / "tokens" / "parts").glob("c*"))


def test_broken_line_is_located(tmp_path: Path, yard: Yard, prefect_api: dict[str, str]) -> None:
    other = Yard(tmp_path, prefect_api)
    (tmp_path / "docs").mkdir()
    write_corpus(tmp_path / "docs" / "a.jsonl", 5, seed=1)
    with (tmp_path / "docs" / "a.jsonl").open("a") as file:
        file.write('{"text": "cut sho\n')
    text = recipe(tmp_path).replace(f"{tmp_path}/tokenizer", f"{yard.folder}/tokenizer")
    ended = other.pretrain(other.recipe(text))
    assert ended.status == 1, ended.err
    assert ended.states()["tokenize-a"] == "failed"
    assert "merge" not in ended.states()
    assert "a.jsonl" in ended.err
    assert "6" in ended.err.split("a.jsonl", 1)[1].splitlines()[0], "no line number"
    assert "Traceback" not in ended.err
