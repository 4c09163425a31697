"""The clean stage: every document is kept or dropped with a reason, the same for any workers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stages.clean import run as clean_run
from stages.clean.config import CleanConfig
from stages.runtime.cli import stage_main
from tests.stages.clean_runs import contents, origin, prose, report, rows, write
from tests.stages.directly import run_directly
from trainyard.artifacts import store
from trainyard.corpus import unit_sizes
from trainyard.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 1500)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files with documents that rules drop, change or leave."""
    for name, first in (("a", 0), ("b/c", 20)):
        texts = [prose(i) if i % 3 else prose(i, 8) for i in range(first, first + 20)]
        texts[4] += "\u00e2\u20ac\u2122"
        texts[7] = " "
        made = [{"id": i, "text": text, "url": f"u{i}"} for i, text in enumerate(texts, first)]
        write(tmp_path / f"in/{name}.jsonl", made)
    return tmp_path / "in"


def clean(source: Path | str, folder: Path | str, **options: Any) -> dict[str, Any]:
    given = {"input": [str(source)], "output_dir": str(folder), "workers": 1, **options}
    return run_directly(CleanConfig, clean_run.run, **given)


RULES = ["fix_text", "min_words:limit=20"]


def test_kept_and_dropped_together_are_the_input(corpus: Path, tmp_path: Path) -> None:
    metrics = clean(corpus, tmp_path / "out", rules=RULES)
    kept, dropped = (rows(tmp_path / "out", kind) for kind in ("documents", "dropped"))
    given = [
        json.loads(line) for name in ("a", "b/c") for line in (corpus / f"{name}.jsonl").open()
    ]
    assert sorted(row["id"] for row in kept + dropped) == [row["id"] for row in given]
    by_id = {row["id"]: row for row in given}
    for row in dropped:  # as they came
        assert {k: row[k] for k in ("id", "text", "url")} == by_id[row["id"]]
    reasons = {row["id"]: row["dropped"]["rule"] for row in dropped}
    assert reasons == {7: "empty", 27: "empty"} | {
        i: "min_words:limit=20" for i in range(0, 40, 3) if i not in (7, 27)
    }
    changed = {row["id"] for row in kept if row["text"] != by_id[row["id"]]["text"]}
    assert changed == {4}  # document 24 is short, and dropped
    assert metrics["documents"] == 40
    assert metrics["kept_documents"] == len(kept)


def test_each_document_says_where_its_bytes_are(corpus: Path, tmp_path: Path) -> None:
    clean(corpus, tmp_path / "out", rules=RULES)
    for row in rows(tmp_path / "out", "d"):
        place = row["origin"]
        with (corpus / place["file"]).open("rb") as file:
            file.seek(place["offset"])
            assert json.loads(file.read(place["length"]))["id"] == row["id"]
    again = rows(tmp_path / "out", "documents")
    clean(store.join(str(tmp_path), "out/documents-*.jsonl"), tmp_path / "two", rules=["nfc"])
    assert rows(tmp_path / "two", "documents") == again  # the first origin stays


def test_the_report_counts_and_shows_what_each_rule_did(corpus: Path, tmp_path: Path) -> None:
    clean(corpus, tmp_path / "out", rules=RULES, num_samples=3)
    reasons = report(tmp_path / "out")["reasons"]
    dropped = [row["dropped"]["rule"] for row in rows(tmp_path / "out", "dropped")]
    assert {name: one["dropped"] for name, one in reasons.items()} == {
        name: dropped.count(name) for name in ("empty", *RULES)
    }
    assert reasons["fix_text"]["changed"] == 2
    shown = reasons["min_words:limit=20"]["samples"]
    assert len(shown) == 3
    assert all(why == "8 words" and text.endswith(".") for _, _, _, why, text in shown)


def test_units_decide_file_names_alone(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean(corpus, tmp_path / "small", rules=RULES)
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 1 << 20)
    clean(corpus, tmp_path / "large", rules=RULES)
    for kind in ("documents", "dropped"):
        assert rows(tmp_path / "small", kind) == rows(tmp_path / "large", kind)
    assert report(tmp_path / "small") == report(tmp_path / "large")


def test_shares_joined_are_one_run(corpus: Path, tmp_path: Path) -> None:
    def run(folder: str, *more: str) -> int:
        words = ["--input", str(corpus), "--output-dir", str(tmp_path / folder), "--workers", "1"]
        words += ["--rules", *RULES, *more]
        return stage_main("clean", CleanConfig, "stages.clean.run", argv=words)

    assert run("whole") == 0
    for rank in (2, 0, 1):
        assert run("joined", "--rank", str(rank), "--world-size", "3") == 0
    assert run("joined", "--world-size", "3") == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
    assert not (tmp_path / "joined.shares").exists()


def test_compressed_input_and_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    good = json.dumps({"text": prose(1)})
    path.write_bytes(gzip.compress(f'{good}\n{{"x": 1}}\n["no"]\n'.encode()))
    with pytest.raises(DataError, match="no key 'text'"):
        clean(path, tmp_path / "stop", rules=RULES)
    assert not (tmp_path / "stop/report.json").exists()
    metrics = clean(path, tmp_path / "skip", rules=RULES, on_bad_line="skip")
    assert (metrics["documents"], metrics["bad_lines"]) == (1, 2)
    bad = rows(tmp_path / "skip", "dropped")
    assert [row["dropped"]["rule"] for row in bad] == ["bad_line"] * 2
    assert [origin(row)[0] for row in bad] == ["in.jsonl.gz"] * 2


def test_a_line_that_a_small_file_unpacks_to_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"x" * (20 << 20) + b'"}\n'))
    assert path.stat().st_size < 30_000
    options = {"rules": RULES, "on_bad_line": "skip", "max_document_bytes": 1 << 16}
    assert clean(path, tmp_path / "out", **options)["bad_lines"] == 1
    (row,) = rows(tmp_path / "out", "dropped")
    assert "more than 65536 bytes" in row["dropped"]["why"]


def test_a_document_keeps_keys_that_no_stage_can_write_as_utf8(tmp_path: Path) -> None:
    row = {"text": prose(1), "note": "\ud800", "big": 2**65}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    clean(tmp_path / "in.jsonl", tmp_path / "out", rules=RULES)
    (row,) = rows(tmp_path / "out", "documents")
    assert (row["note"], row["big"]) == ("\ud800", 2**65)


def test_personal_data_is_masked_on_request(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": f"{prose(1)} Write to a@b.example.org."}])
    clean(source, tmp_path / "out", rules=["nfc"], mask_pii=["emails"])
    (row,) = rows(tmp_path / "out", "documents")
    assert row["text"].endswith(" Write to <EMAIL>.")


@pytest.mark.s3
@pytest.mark.slow
def test_on_s3_the_same_bytes(corpus: Path, tmp_path: Path, s3_url: str) -> None:
    clean(corpus, tmp_path / "local", rules=RULES)
    clean(corpus, f"{s3_url}/out", rules=RULES)
    assert contents(f"{s3_url}/out") == contents(tmp_path / "local")


@pytest.mark.slow
def test_the_preset_openwebtext_counts_tokens(tmp_path: Path) -> None:
    """128 tokens are asked for below 1024 characters, and 512 characters of all."""
    text = "The yard opens before dawn, and the trains of the day wait for it. " * 30
    source = write(tmp_path / "in.jsonl", [{"text": text[:n]} for n in (100, 511, 512, 1500)])
    options = {"preset": "openwebtext", "tokenizer_type": "ByteLevelTokenizer"}
    clean(source, tmp_path / "out", **options)
    assert [len(row["text"]) for row in rows(tmp_path / "out", "documents")] == [512, 1500]
    assert [row["dropped"] for row in rows(tmp_path / "out", "dropped")] == [
        {"rule": "min_tokens", "why": "100 tokens"},
        {"rule": "min_chars", "why": "511 characters"},
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no rule to clean by"),
        ({"preset": "openwebtext"}, "min_tokens counts tokens and needs --tokenizer-type"),
        ({"rules": ["nfc"], "tokenizer_type": "ByteLevelTokenizer"}, "no rule counts tokens"),
        ({"rules": ["nfc"], "rank": 1}, "--rank 1 needs --world-size"),
        ({"rules": ["nfc"], "num_samples": -1}, "num-samples"),
        ({"rules": ["nfd"]}, "no rule 'nfd'"),
    ],
)
def test_refusals(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        clean(tmp_path / "none", tmp_path / "out", **options)
