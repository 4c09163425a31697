"""The decontaminate stage: what it writes has no n-gram in common with the evaluation sets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stages.decontaminate import run as decontaminate_run
from stages.decontaminate.config import DecontaminateConfig
from stages.runtime.cli import stage_main
from tests.stages.clean_runs import contents, report, rows, write
from tests.stages.directly import run_directly
from trainyard.collection.contamination.ngrams import Matcher, task_ngrams
from trainyard.corpus import unit_sizes
from trainyard.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 8000)


def sentences(seed: int, count: int = 12) -> list[str]:
    """Of seven words each, 40 characters or so."""
    rng = random.Random(seed)
    return [
        " ".join(f"word{rng.randrange(10**4)}" for _ in range(7)).capitalize() + "."
        for _ in range(count)
    ]


QUESTIONS = [" ".join(sentences(100 + i, 3)).replace(".", "") + "?" for i in range(6)]
SHORT = [" ".join(sentences(200 + i, 2)[0:1]).rstrip(".") + " one two?" for i in range(2)]


def corpus_rows() -> list[dict[str, Any]]:
    """20 documents; in five stands a question of a set, in another case and with other marks."""
    documents = [sentences(i) for i in range(20)]
    documents[3][6] += f" {QUESTIONS[0].upper().replace(' ', ',  ')} "
    documents[8][0] = QUESTIONS[1] + " " + documents[8][0]
    documents[9][11] += " " + SHORT[0]
    documents[12][6] += " " + QUESTIONS[2]
    documents[15] = [QUESTIONS[3]]
    return [{"id": i, "text": " ".join(text)} for i, text in enumerate(documents)]


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, Any]:
    write(tmp_path / "q.jsonl", [{"question": text} for text in (*QUESTIONS[:2], *SHORT)])
    write(tmp_path / "t.jsonl", [{"text": text} for text in QUESTIONS[1:]])
    places = [str(tmp_path / name) for name in ("q.jsonl", "t.jsonl")]
    return {"tasks": ["nq", "lambada"], "task_data": places}


def decontaminate(source: Path | str, folder: Path | str, **options: Any) -> dict[str, Any]:
    given = {"input": [str(source)], "output_dir": str(folder), "workers": 1, **options}
    return run_directly(DecontaminateConfig, decontaminate_run.run, **given)


MATCHER = Matcher(task_ngrams([*QUESTIONS, *SHORT], 8, 13))


@pytest.mark.parametrize("mode", ["split", "drop"])
def test_the_output_has_no_ngram_in_common(tmp_path: Path, sets: dict[str, Any], mode: str) -> None:
    given = corpus_rows()
    source = write(tmp_path / "in.jsonl", given)
    have_hits = [row["id"] for row in given if next(MATCHER.hits(row["text"]), None)]
    assert have_hits == [3, 8, 9, 12, 15]
    metrics = decontaminate(source, tmp_path / "out", **sets, mode=mode, remove_char_each_side=40)
    kept, away = (rows(tmp_path / "out", kind) for kind in ("documents", "dropped"))
    assert not any(next(MATCHER.hits(row["text"]), None) for row in kept)
    assert [row["id"] for row in away] == [3, 8, 9, 12, 15]
    assert [row["text"] for row in away] == [given[row["id"]]["text"] for row in away]
    untouched = {row["id"]: row["text"] for row in kept if row["id"] not in (3, 8, 9, 12, 15)}
    assert untouched == {row["id"]: row["text"] for row in given if row["id"] in untouched}
    assert len(untouched) == 15
    pieces = [row["id"] for row in kept if row["id"] not in untouched]
    assert pieces == ([3, 3, 8, 9, 12, 12] if mode == "split" else [])
    assert metrics["documents"] == 20
    assert metrics["kept_documents"] == 15 + len(set(pieces))


def test_pieces_are_named_as_upstream_names_them(tmp_path: Path, sets: dict[str, Any]) -> None:
    given = corpus_rows()
    given[12]["split_id"] = "older"
    options = {**sets, "remove_char_each_side": 40, "filter_text_char_len": 100}
    decontaminate(write(tmp_path / "in.jsonl", given), tmp_path / "out", **options)
    named = [(row["id"], row["split_id"]) for row in rows(tmp_path / "out", "documents")]
    assert (0, "nq-lambada-0000000001-0000") in named
    assert (12, "older-nq-lambada-0000000013-0000") in named
    assert (12, "older-nq-lambada-0000000013-0001") in named


def test_the_report_counts_by_task(tmp_path: Path, sets: dict[str, Any]) -> None:
    decontaminate(write(tmp_path / "in.jsonl", corpus_rows()), tmp_path / "out", **sets)
    tasks = report(tmp_path / "out")["tasks"]
    assert {name: one["documents"] for name, one in tasks.items()} == {"nq": 3, "lambada": 3}
    reasons = report(tmp_path / "out")["reasons"]
    assert reasons["nothing_left"]["dropped"] >= 1
    why = rows(tmp_path / "out", "dropped")[1]["dropped"]
    assert why["tasks"] == ["lambada", "nq"]
    assert why["why"].startswith("lambada nq: word")


def test_an_ngram_that_is_common_in_the_corpus_stays(tmp_path: Path, sets: dict[str, Any]) -> None:
    texts = [{"text": f"{QUESTIONS[4]} {' '.join(sentences(i))}"} for i in range(5)]
    source = write(tmp_path / "in.jsonl", texts)
    at_limit = decontaminate(source, tmp_path / "five", **sets, key_threshold=5)
    assert at_limit["kept_chars"] == at_limit["chars"]
    assert report(tmp_path / "five")["common_ngrams"]
    below = decontaminate(source, tmp_path / "six", **sets, key_threshold=6)
    assert below["kept_chars"] < below["chars"]
    assert decontaminate(source, tmp_path / "none", **sets, key_threshold=0)["common_ngrams"] == 0


def test_a_document_of_too_many_parts_is_dropped(tmp_path: Path, sets: dict[str, Any]) -> None:
    text = "".join(f"{' '.join(sentences(i))} {QUESTIONS[i]} " for i in range(6))
    source = write(tmp_path / "in.jsonl", [{"text": text}])
    options = {**sets, "remove_char_each_side": 10, "filter_text_char_len": 50}
    decontaminate(source, tmp_path / "six", **options, splits_count=6)
    assert len(rows(tmp_path / "six", "documents")) == 6
    metrics = decontaminate(source, tmp_path / "five", **options, splits_count=5)
    assert metrics["dropped"]["splits_count"] == 1
    assert rows(tmp_path / "five", "documents") == []


def test_shares_joined_are_one_run(tmp_path: Path, sets: dict[str, Any]) -> None:
    source = write(tmp_path / "in.jsonl", corpus_rows())

    def run(folder: str, *more: str) -> int:
        words = ["--input", str(source), "--output-dir", str(tmp_path / folder), "--workers", "1"]
        words += ["--tasks", *sets["tasks"], "--task-data", *sets["task_data"], *more]
        return stage_main(
            "decontaminate", DecontaminateConfig, "stages.decontaminate.run", argv=words
        )

    assert run("whole") == 0
    for rank in (1, 0):
        assert run("joined", "--rank", str(rank), "--world-size", "2") == 0
    assert run("joined", "--world-size", "2") == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


def test_a_set_without_ngrams_is_refused(tmp_path: Path, sets: dict[str, Any]) -> None:
    source = write(tmp_path / "in.jsonl", corpus_rows())
    write(tmp_path / "q.jsonl", [{"question": "Too short?"}])
    with pytest.raises(DataError, match=r"--tasks nq: no text of .* has 8 words"):
        decontaminate(source, tmp_path / "out", **sets)


@pytest.mark.s3
@pytest.mark.slow
def test_on_s3_the_same_bytes(tmp_path: Path, s3_url: str, sets: dict[str, Any]) -> None:
    source = write(tmp_path / "in.jsonl", corpus_rows())
    decontaminate(source, tmp_path / "local", **sets)
    decontaminate(source, f"{s3_url}/out", **sets)
    assert contents(f"{s3_url}/out") == contents(tmp_path / "local")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ["nq"], "task_data": []}, "names 1 evaluation sets and --task-data 0"),
        ({"tasks": ["nq", "nq"], "task_data": ["a", "b"]}, "--tasks nq: .* given once"),
        ({"tasks": ["a/b"], "task_data": ["a"]}, "--tasks a/b: a name is of letters"),
        (
            {"tasks": ["nq"], "task_data": ["a"], "min_ngram_size": 14},
            "--min-ngram-size 14 must be at most --max-ngram-size, 13",
        ),
    ],
)
def test_refusals(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        decontaminate(tmp_path / "none", tmp_path / "out", **options)
