"""The tokenize stage: Megatron's bytes, for any number of workers, units and kinds of file."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from stages.tokenize import run as tokenize_run
from tests.stages.tokenize_runs import NULL, documents, files, numbered, origins, tokenize, write
from trainyard.artifacts import store
from trainyard.corpus import unit_sizes
from trainyard.errors import InfrastructureError
from trainyard.tokenizers.null import NullTokenizer


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 200)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_run, "available_cores", lambda: 4)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A folder of two files, with empty documents and long ones."""
    write(tmp_path / "numbers/a.jsonl", *numbered(45))
    write(tmp_path / "numbers/b.jsonl", *numbered(15, first=45))
    return tmp_path / "numbers"


# --- Megatron's bytes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "corpus",
    [
        "books_en",
        pytest.param("wiki_zh", marks=pytest.mark.slow),
        pytest.param("corpus_en", marks=pytest.mark.slow),
    ],
)
def test_gpt2_files_are_megatrons_byte_for_byte(shared: Path, tmp_path: Path, corpus: str) -> None:
    cases = json.loads((shared / "golden/preprocess_gpt2.json").read_text())["cases"]
    (case,) = (c for c in cases if c["input"].endswith(f"/{corpus}.jsonl"))
    vocab = shared / "data/vocab/gpt2"
    tokenize(
        shared / case["input"],
        tmp_path / "out",
        json_keys=[case["json_key"]],
        append_eod=case["append_eod"],
        tokenizer_type="GPT2BPETokenizer",
        vocab_size=None,
        vocab_file=str(vocab / "vocab.json"),
        merge_file=str(vocab / "merges.txt"),
        workers=2,
    )
    bin_data, idx_data, _ = files(tmp_path / "out")
    assert len(bin_data) == case["bin_bytes"]
    assert hashlib.md5(bin_data).hexdigest() == case["bin_md5"]
    assert hashlib.md5(idx_data).hexdigest() == case["idx_md5"]


def test_megatrons_rules_for_empty_texts_sentences_and_ends(tmp_path: Path) -> None:
    rows = [{"text": t} for t in ("1 2", "", ["3", "", "4 5"], [], ["", "6"], ["7", ""])]
    tokenize(write(tmp_path / "a.jsonl", *rows), tmp_path / "plain")
    assert documents(tmp_path / "plain") == [[[1, 2]], [], [[3], [4, 5]], [], [[6]], [[7]]]
    tokenize(tmp_path / "a.jsonl", tmp_path / "eod", append_eod=True)
    expected = [[[1, 2, 999]], [], [[3], [4, 5, 999]], [], [[6, 999]], [[7, 999]]]
    assert documents(tmp_path / "eod") == expected


@pytest.mark.slow
def test_sentences_are_split_in_the_same_run(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NLTK_DATA", str(shared / "data/nltk_data"))
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 100)
    texts = ["One is here. Two is there.\nThree!", "", "Only one"]
    path = write(tmp_path / "a.jsonl", *({"text": t, "title": t[:4]} for t in texts))
    kept = {"tokenizer_type": "ByteLevelTokenizer", "vocab_size": None}
    options = {**kept, "split_sentences": True, "json_keys": ["text", "title"]}
    for partitions in (1, 3):
        prefix = tmp_path / f"out{partitions}"
        metrics = tokenize(path, prefix, **options, partitions=partitions)
        found = documents(prefix, "_text_sentence")
        letters = [[bytes(ids).decode() for ids in doc] for doc in found]
        assert letters == [["One is here.", "Two is there.", "Three!"], [], ["Only one"]]
        assert len(documents(prefix, "_title_sentence")) == 3
        assert metrics["sequences"] == {"text": 4, "title": 2}
    tokenize(path, tmp_path / "kept", **options, keep_newlines=True)
    found = documents(tmp_path / "kept", "_text_sentence")
    assert [bytes(ids).decode() for ids in found[0]] == [
        "One is here. ",
        "Two is there.\n",
        "Three!",
    ]


# --- laws -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("four_cores")
def test_any_workers_partitions_and_units_give_the_same_bytes(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(numbers, tmp_path / "whole", append_eod=True)
    expected = files(tmp_path / "whole")
    cases = [(40, 1, 1, False), (97, 2, 7, True), (300, 4, 2, True), (500, 3, 1, False)]
    for unit_bytes, workers, partitions, side_by_side in cases:
        monkeypatch.setattr(unit_sizes, "UNIT_BYTES", unit_bytes)
        monkeypatch.setattr(NullTokenizer, "releases_gil", side_by_side)
        prefix = tmp_path / f"{unit_bytes}"
        given = {"workers": workers, "partitions": partitions, "append_eod": True}
        tokenize(numbers, prefix, **given, keep_sequential_samples=partitions > 1)
        assert files(prefix) == expected


def test_every_document_knows_where_it_came_from(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (numbers / "a.jsonl").read_text().splitlines(keepends=True)
    (numbers / "a.jsonl").write_text("".join([*lines[:7], "\n", " \n", *lines[7:]]))
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 150)
    tokenize(numbers, tmp_path / "out", json_keys=["text", "id"][:1])
    rows = documents(tmp_path / "out")
    for k, origin in enumerate(origins(tmp_path / "out")):
        data = Path(origin.source).read_bytes()
        record = json.loads(data[origin.offset : origin.offset + origin.length])
        assert [n for ids in rows[k] for n in ids] == [int(n) for n in record["text"].split()]
        assert data[: origin.offset].count(b"\n") + 1 == origin.line
        assert origin.id == record.get("id")
    assert k == 59


def test_stores_are_alike(numbers: Path, store_url: str, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        store.write_bytes(store.join(store_url, "in", name), (numbers / name).read_bytes())
    metrics = tokenize(store.join(store_url, "in"), store.join(store_url, "out/p"))
    tokenize(numbers, tmp_path / "local")
    assert files(store.join(store_url, "out/p"))[:2] == files(tmp_path / "local")[:2]
    assert metrics["documents"] == 60


def test_inputs_come_as_listed_and_from_patterns_sorted(numbers: Path, tmp_path: Path) -> None:
    tokenize(numbers / "*.jsonl", tmp_path / "sorted")
    both = [str(numbers / "b.jsonl"), str(numbers / "a.jsonl")]
    tokenize("", tmp_path / "listed", input=both)
    forward, backward = documents(tmp_path / "sorted"), documents(tmp_path / "listed")
    assert forward == backward[15:] + backward[:15]
    assert forward != backward


def test_a_file_may_be_listed_twice(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 300)
    tokenize("", tmp_path / "out", input=[str(numbers / "a.jsonl")] * 2)
    found = origins(tmp_path / "out")
    assert found[:45] == found[45:]
    assert found[44].line == 45


def test_several_keys_are_made_in_one_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"a": "1", "b": "2"}, {"a": "3", "b": ""})
    metrics = tokenize(path, tmp_path / "out", json_key=["b", "a"])
    assert documents(tmp_path / "out", "_a_document") == [[[1]], [[3]]]
    assert documents(tmp_path / "out", "_b_document") == [[[2]], []]
    assert metrics["tokens"] == {"b": 1, "a": 2}
    assert origins(tmp_path / "out", "_a_document") == origins(tmp_path / "out", "_b_document")


def test_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1 2"}\n'))
    (tmp_path / "b.txt").write_text("3\n4\n")
    (tmp_path / "c.json.bz2").write_bytes(bz2.compress(b'{"text": "5"}'))
    rows = pyarrow.table({"text": ["6", "", "7 8"], "id": ["x", "y", None]})
    pyarrow.parquet.write_table(rows, tmp_path / "d.parquet", row_group_size=2)
    (tmp_path / "e.jsonl").write_bytes(b"")
    metrics = tokenize("", tmp_path / "out", input=[str(p) for p in sorted(tmp_path.iterdir())])
    assert documents(tmp_path / "out") == [[[1, 2]], [[3, 4]], [[5]], [[6]], [], [[7, 8]]]
    assert [(o.line, o.id) for o in origins(tmp_path / "out")[3:]] == [
        (1, "x"),
        (2, "y"),
        (3, None),
    ]
    assert (metrics["empty_files"], metrics["vocab_size"]) == (1, NULL["vocab_size"])


@pytest.mark.usefixtures("four_cores", "small_units")
def test_finished_units_are_kept_when_the_number_of_workers_changes(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = tokenize_run.tokenize_unit

    def failing(job: Any) -> int:
        if len(done) == 5:
            raise InfrastructureError("the power went")
        done.append(job.unit.name)
        return real(job)

    monkeypatch.setattr(NullTokenizer, "releases_gil", True)  # two workers are two threads
    monkeypatch.setattr(tokenize_run, "tokenize_unit", failing)
    with pytest.raises(InfrastructureError):
        tokenize(numbers, tmp_path / "out")
    first, done[:] = list(done), []
    monkeypatch.setattr(
        tokenize_run, "tokenize_unit", lambda j: done.append(j.unit.name) or real(j)
    )
    tokenize(numbers, tmp_path / "out", workers=2)
    assert done
    assert not set(first) & set(done)
    tokenize(numbers, tmp_path / "undisturbed")
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_more_workers_than_cores_are_not_started(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokenize_run, "available_cores", lambda: 1)
    monkeypatch.setattr(tokenize_run, "run_jobs", lambda f, jobs, crew, e: crews.append(crew) or ())
    crews: list[Any] = []
    with pytest.raises(AssertionError, match="not all units"), caplog.at_level("INFO"):
        tokenize(numbers, tmp_path / "out", workers=32)
    assert [(crew.processes, crew.threads) for crew in crews] == [(0, 1)]
    assert "--workers 32 is lowered to 1" in caplog.text
