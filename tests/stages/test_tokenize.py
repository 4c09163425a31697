"""The tokenize stage: Megatron's bytes, whatever the number of workers and whatever kills them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.tokenize import run as tokenize_run
from stages.tokenize.config import TokenizeConfig
from tests.stages.directly import run_directly
from trainyard.artifacts import store
from trainyard.corpus.indexed import IndexedDataset
from trainyard.errors import ConfigError, DataError, InfrastructureError

NULL: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": 1000}


def tokenize(url: str | Path, prefix: str | Path, **options: Any) -> dict[str, Any]:
    given = {"input": [str(url)], "output_prefix": str(prefix), **NULL, **options}
    return run_directly(TokenizeConfig, tokenize_run.run, **given)


def documents(prefix: str | Path, key: str = "text") -> Any:
    dataset = IndexedDataset(f"{prefix}_{key}_document")
    return [[s.tolist() for s in doc] for doc in dataset.documents()]


def pair(prefix: str | Path, key: str = "text") -> tuple[bytes, bytes]:
    stem = f"{prefix}_{key}_document"
    return store.read_bytes(stem + ".bin"), store.read_bytes(stem + ".idx")


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_run, "UNIT_BYTES", 200)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A folder of two files, with empty documents and long ones."""
    rows = [{"text": " ".join(str(j % 999) for j in range(i % 40))} for i in range(60)]
    write(tmp_path / "numbers/a.jsonl", *rows[:45])
    write(tmp_path / "numbers/b.jsonl", *rows[45:])
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
    )
    bin_data, idx_data = pair(tmp_path / "out")
    assert len(bin_data) == case["bin_bytes"]
    assert hashlib.md5(bin_data).hexdigest() == case["bin_md5"]
    assert hashlib.md5(idx_data).hexdigest() == case["idx_md5"]


def test_megatrons_rules_for_empty_texts_sentences_and_ends(tmp_path: Path) -> None:
    rows = [{"text": t} for t in ("1 2", "", ["3", "", "4 5"], [], ["", "6"])]
    tokenize(write(tmp_path / "a.jsonl", *rows), tmp_path / "plain")
    assert documents(tmp_path / "plain") == [[[1, 2]], [], [[3], [4, 5]], [], [[6]]]
    tokenize(tmp_path / "a.jsonl", tmp_path / "eod", append_eod=True)
    expected = [[[1, 2, 999]], [], [[3], [4, 5, 999]], [], [[6, 999]]]
    assert documents(tmp_path / "eod") == expected


# --- laws -------------------------------------------------------------------------------------


def test_any_number_of_workers_and_any_units_give_the_same_bytes(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(numbers, tmp_path / "whole", append_eod=True)
    expected = pair(tmp_path / "whole")
    for unit_bytes, workers in ((40, 1), (97, 1), (500, 3)):
        monkeypatch.setattr(tokenize_run, "UNIT_BYTES", unit_bytes)
        prefix = tmp_path / f"{unit_bytes}-{workers}"
        tokenize(numbers, prefix, append_eod=True, workers=workers)
        assert pair(prefix) == expected


def test_stores_are_alike(numbers: Path, store_url: str, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        store.write_bytes(store.join(store_url, "in", name), (numbers / name).read_bytes())
    metrics = tokenize(store.join(store_url, "in"), store.join(store_url, "out/p"))
    tokenize(numbers, tmp_path / "local")
    assert pair(store.join(store_url, "out/p")) == pair(tmp_path / "local")
    assert metrics["documents"] == 60


def test_inputs_come_as_listed_and_from_patterns_sorted(numbers: Path, tmp_path: Path) -> None:
    tokenize(numbers / "*.jsonl", tmp_path / "sorted")
    both = [str(numbers / "b.jsonl"), str(numbers / "a.jsonl")]
    tokenize("", tmp_path / "listed", input=both)
    forward, backward = documents(tmp_path / "sorted"), documents(tmp_path / "listed")
    assert forward == backward[15:] + backward[:15]
    assert forward != backward


def test_several_keys_are_made_in_one_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"a": "1", "b": "2"}, {"a": "3", "b": ""})
    metrics = tokenize(path, tmp_path / "out", json_keys=["b", "a"])
    assert documents(tmp_path / "out", "a") == [[[1]], [[3]]]
    assert documents(tmp_path / "out", "b") == [[[2]], []]
    assert metrics["tokens"] == {"b": 1, "a": 2}


def test_gzip_and_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1 2"}\n'))
    (tmp_path / "b.txt").write_text("3\n4\n")
    files = [str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.txt")]
    tokenize("", tmp_path / "out", input=files)
    assert documents(tmp_path / "out") == [[[1, 2]], [[3, 4]]]


@pytest.mark.usefixtures("small_units")
def test_finished_units_are_not_done_again(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = tokenize_run.tokenize_unit

    def failing(unit: Any) -> dict[str, Any]:
        if len(done) == 5:
            raise InfrastructureError("the power went")
        done.append(unit.name)
        return real(unit)

    monkeypatch.setattr(tokenize_run, "tokenize_unit", failing)
    with pytest.raises(InfrastructureError):
        tokenize(numbers, tmp_path / "out")
    first, done[:] = list(done), []
    monkeypatch.setattr(tokenize_run, "tokenize_unit", lambda u: done.append(u.name) or real(u))
    tokenize(numbers, tmp_path / "out")
    assert done
    assert not set(first) & set(done)
    tokenize(numbers, tmp_path / "undisturbed")
    assert pair(tmp_path / "out") == pair(tmp_path / "undisturbed")


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("small_units")
def test_a_bad_line_is_named_whoever_reads_it(numbers: Path, tmp_path: Path, workers: int) -> None:
    lines = (numbers / "b.jsonl").read_text().splitlines(keepends=True)
    lines[7] = '{"text": "1 2 three"}\n'
    lines[12] = '{"body": "1"}\n'
    (numbers / "b.jsonl").write_text("".join(lines))
    message = r"b\.jsonl: line 8 \(byte \d+\): cannot be tokenized: 'three' is not an id"
    with pytest.raises(DataError, match=message):
        tokenize(numbers, tmp_path / "out", workers=workers)
    assert not list(tmp_path.glob("out_*"))


def test_no_document_and_no_token_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="there is no document in it"):
        tokenize(tmp_path / "empty.jsonl", tmp_path / "out")
    path = write(tmp_path / "blank.jsonl", {"text": ""}, {"text": ""})
    with pytest.raises(DataError, match="key 'text' is empty in all of 2 documents"):
        tokenize(path, tmp_path / "out")
    assert not list(tmp_path.glob("out_*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": []}, "--input names no file"),
        ({"json_keys": []}, "--json-keys names no key"),
        ({"json_keys": ["a", "a"]}, "--json-keys names a key twice"),
        ({"workers": 0}, "--workers must be at least 1"),
        ({"log_interval": 0}, "--log-interval must be at least 1"),
        ({"vocab_size": None}, "needs --vocab-size"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenize("a.jsonl", "out", **options)


# --- the command ------------------------------------------------------------------------------


def command(source: Path, prefix: Path, *more: str) -> list[str]:
    base = [sys.executable, "-m", "stages.tokenize", "--input", str(source)]
    return [*base, "--output-prefix", str(prefix), "--tokenizer-type", "NullTokenizer", *more]


def test_a_missing_input_and_a_bad_line_end_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "1"}\n{"text": \n')
    for name, words in (("none.jsonl", "none.jsonl"), ("bad.jsonl", "line 2 (byte 14)")):
        line = command(tmp_path / name, tmp_path / "out", "--vocab-size", "9", "--workers", "2")
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_sigterm_stops_workers_promptly_with_nothing_published(tmp_path: Path) -> None:
    row = json.dumps({"text": "1 2 3 4 5 6 7 8 9 " * 400}) + "\n"
    (tmp_path / "long.jsonl").write_text(row * 4000)
    line = command(tmp_path / "long.jsonl", tmp_path / "out", "--vocab-size", "99")
    process = subprocess.Popen([*line, "--workers", "2"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("out.work/*/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert time.monotonic() - began < 3
    assert not list(tmp_path.glob("out_*"))
    assert not (tmp_path / "out.manifest.json").exists()


def test_a_killed_worker_is_an_infrastructure_error(tmp_path: Path) -> None:
    row = json.dumps({"text": "1 2 3 4 5 6 7 8 9 " * 400}) + "\n"
    (tmp_path / "long.jsonl").write_text(row * 4000)
    line = command(tmp_path / "long.jsonl", tmp_path / "out", "--vocab-size", "99")
    process = subprocess.Popen([*line, "--workers", "2"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("out.work/*/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(_spawned(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "a worker process died" in err


def _spawned(parent: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "spawn_main" in args]
