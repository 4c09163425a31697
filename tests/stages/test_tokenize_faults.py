"""What tokenize does about bad lines, bad options, dying workers, and signals."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stages.runtime.cli import stage_main
from stages.tokenize import run as tokenize_run
from stages.tokenize.config import TokenizeConfig
from tests.stages.tokenize_runs import command, documents, numbered, origins, tokenize, write
from trainyard.corpus import unit_sizes
from trainyard.errors import ConfigError, DataError
from trainyard.tokenizers.null import NullTokenizer

pytestmark = pytest.mark.slow

BAD: list[tuple[bytes, str]] = [
    (b'{"text": \n', "not a JSON document"),
    (b'{"body": "1"}\n', "no key 'text'"),
    (b'{"text": 7}\n', "holds a JSON number"),
    (b'{"text": ["1", 2]}\n', "array"),
    (b'{"text": "\xff"}\n', "UTF-8"),
    (b'{"text": "\\ud800"}\n', "surrogate"),
    (b'["1"]\n', "array"),
]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 200)
    monkeypatch.setattr(tokenize_run, "available_cores", lambda: 4)


# --- bad lines --------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "words"), BAD)
def test_bad_line_fails_without_output(tmp_path: Path, line: bytes, words: str) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(30))
    before = path.stat().st_size
    path.write_bytes(path.read_bytes() + line + path.read_bytes())
    with pytest.raises(DataError, match=words) as caught:
        tokenize(path, tmp_path / "out")
    assert f"a.jsonl: line 31 (byte {before}): " in str(caught.value)
    assert str(caught.value).endswith("; --on-bad-line skip leaves such lines out")
    assert not list(tmp_path.glob("out_*"))
    assert not list(tmp_path.glob(".tmp-*"))


def test_skipped_lines_are_counted_listed_and_leave_the_rest(tmp_path: Path) -> None:
    rows = [json.dumps(row).encode() + b"\n" for row in numbered(40)]
    mixed = [*rows[:10], BAD[0][0], *rows[10:25], b"\n", BAD[1][0], BAD[4][0], *rows[25:]]
    (tmp_path / "a.jsonl").write_bytes(b"".join(mixed))
    (tmp_path / "b.jsonl").write_bytes(BAD[2][0] + rows[0])
    write(tmp_path / "clean.jsonl", *numbered(40), *numbered(1))
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    metrics = tokenize("", tmp_path / "out", input=files, on_bad_line="skip", workers=2)
    tokenize(tmp_path / "clean.jsonl", tmp_path / "clean")
    assert documents(tmp_path / "out") == documents(tmp_path / "clean")
    assert metrics["bad_lines"] == 4
    listed = [json.loads(line) for line in (tmp_path / "out.bad_lines.jsonl").open()]
    assert [(Path(bad["source"]).name, bad["line"]) for bad in listed] == [
        ("a.jsonl", 11),
        ("a.jsonl", 28),
        ("a.jsonl", 29),
        ("b.jsonl", 1),
    ]
    for bad in listed:
        data = Path(bad["source"]).read_bytes()
        assert data[: bad["offset"]].count(b"\n") + 1 == bad["line"]
        assert bad["reason"]
    assert [origin.line for origin in origins(tmp_path / "out")][-16:] == [*range(30, 45), 2]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_one_bad_line_more_than_allowed_stops(tmp_path: Path, workers: int) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(60))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[20:20] = [BAD[0][0]]
    lines[40:40] = [BAD[1][0]]
    lines[50:50] = [BAD[2][0]]
    path.write_bytes(b"".join(lines))
    options: dict[str, Any] = {"on_bad_line": "skip", "workers": workers}
    assert tokenize(path, tmp_path / "three", **options, max_bad_lines=3)["bad_lines"] == 3
    message = r"line 41 \(byte \d+\): no key .* bad line number 2, and --max-bad-lines is 1"
    with pytest.raises(DataError, match=message):
        tokenize(path, tmp_path / "one", **options, max_bad_lines=1)
    assert not list(tmp_path.glob("one_*"))


@pytest.mark.parametrize(("workers", "side_by_side"), [(1, False), (2, False), (2, True)])
def test_the_first_error_is_reported_whichever_worker_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, side_by_side: bool
) -> None:
    monkeypatch.setattr(NullTokenizer, "releases_gil", side_by_side)
    rows = numbered(60)
    rows[17] = {"text": "1 2 three"}
    rows[40] = {"body": "1"}
    rows[55] = {"text": "1 1000"}
    path = write(tmp_path / "b.jsonl", *rows)
    message = r"b\.jsonl: line 18 \(byte \d+\): cannot be tokenized: 'three' is not an id"
    with pytest.raises(DataError, match=message):
        tokenize(path, tmp_path / "out", workers=workers)
    assert not list(tmp_path.glob("out_*"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_tokenizer_refuses_is_a_bad_line(tmp_path: Path, workers: int) -> None:
    rows = [{**row, "title": "5"} for row in numbered(60)]
    mixed: list[Any] = [{**row} for row in rows]
    for i in (17, 18, 40):
        mixed.insert(i, {"text": "1 2", "title": "three" if i == 40 else "1 four", "id": "x"})
    mixed.insert(19, {"text": 7})
    path = write(tmp_path / "a.jsonl", *mixed)
    write(tmp_path / "clean.jsonl", *rows)
    keys: dict[str, Any] = {"json_keys": ["text", "title"], "workers": workers}
    tokenize(tmp_path / "clean.jsonl", tmp_path / "clean", **keys)
    skip = {**keys, "on_bad_line": "skip"}
    metrics = tokenize(path, tmp_path / "out", **skip, max_bad_lines=4, validate_tokenizer=1)
    assert (metrics["bad_lines"], metrics["validated_documents"]) == (4, 60)
    for stem in ("_text_document", "_title_document"):
        assert documents(tmp_path / "out", stem) == documents(tmp_path / "clean", stem)
    listed = [json.loads(line) for line in (tmp_path / "out.bad_lines.jsonl").open()]
    assert [bad["line"] for bad in listed] == [18, 19, 20, 42]
    assert listed[0]["reason"].startswith("cannot be tokenized: 'four' is not an id")
    assert listed[0]["excerpt"] == "1 four"
    assert "skip" not in json.dumps(listed)
    kept = {doc.line for doc in origins(tmp_path / "out")}
    assert kept == set(range(1, 65)) - {18, 19, 20, 42}
    message = r"line 42 .* it begins 'three'\. This is bad line number 4"
    with pytest.raises(DataError, match=message):
        tokenize(path, tmp_path / "few", **skip, max_bad_lines=3)
    message = r"line 18 .*'four' is not an id.*; it begins '1 four'; --on-bad-line skip leaves"
    with pytest.raises(DataError, match=message):
        tokenize(path, tmp_path / "stop", **keys)


def test_only_refused_documents_is_no_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    with pytest.raises(DataError, match="no document in it beside 2 bad lines"):
        tokenize(path, tmp_path / "out", on_bad_line="skip")


def test_a_folder_may_hold_what_writers_leave(tmp_path: Path) -> None:
    write(tmp_path / "in/a.jsonl", *numbered(3))
    write(tmp_path / "in/b.jsonl", *numbered(3))
    (tmp_path / "in/_SUCCESS").write_bytes(b"")
    (tmp_path / "in/.a.jsonl.crc").write_bytes(b"crc")
    tokenize(tmp_path / "in", tmp_path / "out")
    assert documents(tmp_path / "out")[3:] == documents(tmp_path / "out")[:3]


def test_failure_leaves_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    path = write(tmp_path / "a.jsonl", *numbered(100))
    path.write_bytes(BAD[0][0] + path.read_bytes())
    with pytest.raises(DataError, match="line 1 "):
        tokenize(path, tmp_path / "out", workers=2)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_truncated_gzip_is_a_fault_or_a_counted_one(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in numbered(400)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        tokenize(tmp_path / "a.jsonl.gz", tmp_path / "out")
    metrics = tokenize(tmp_path / "a.jsonl.gz", tmp_path / "skip", on_bad_line="skip")
    assert metrics["bad_lines"] == 1
    assert documents(tmp_path / "skip")[3] == [[0, 1, 2]]


def test_no_document_and_no_token_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="there is no document in it"):
        tokenize(tmp_path / "empty.jsonl", tmp_path / "out")
    path = write(tmp_path / "blank.jsonl", {"text": ""}, {"text": ""})
    with pytest.raises(DataError, match="key 'text' is empty in all of 2 documents"):
        tokenize(path, tmp_path / "out")
    (tmp_path / "bad.jsonl").write_bytes(BAD[1][0])
    with pytest.raises(DataError, match="no document in it beside 1 bad lines"):
        tokenize(tmp_path / "bad.jsonl", tmp_path / "out", on_bad_line="skip")
    assert not list(tmp_path.glob("out_*"))


def test_empty_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "in/a.jsonl", *numbered(3))
    (tmp_path / "in/b.jsonl").write_bytes(b"")
    assert tokenize(tmp_path / "in", tmp_path / "out")["empty_files"] == 1
    assert "b.jsonl is empty" in caplog.text


# --- the reference ----------------------------------------------------------------------------


def test_difference_from_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"{i} {i + 1}", "id": f"doc-{i}"} for i in range(50)]
    path = write(tmp_path / "a.jsonl", *rows)
    metrics = tokenize(path, tmp_path / "equal", validate_tokenizer=0.5)
    assert 10 < metrics["validated_documents"] < 40
    assert metrics["engine"]
    again = tokenize(path, tmp_path / "again", validate_tokenizer=0.5, workers=2)
    assert again["validated_documents"] == metrics["validated_documents"]

    def wrong(self: NullTokenizer, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        return [ids[0], 7] if ids[0] == 33 else ids

    monkeypatch.setattr(NullTokenizer, "encode_reference", wrong)
    message = r"line 34 .* id 'doc-33', key 'text': token 1 is 34 by the engine and 7 by the ref"
    with pytest.raises(DataError, match=message):
        tokenize(path, tmp_path / "differs", validate_tokenizer=1)


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": []}, "--input names no file"),
        ({"json_keys": []}, "--json-keys names no key"),
        ({"json_keys": ["a", "a"]}, "--json-keys names a key twice"),
        ({"json_keys": ["a/b"]}, "part of a file name"),
        ({"json_keys": ["a"], "json_key": ["b"]}, "'json_key' is another name of 'json_keys'"),
        ({"workers": 0}, "--workers must be at least 1"),
        ({"partitions": 0}, "--partitions must be at least 1"),
        ({"log_interval": 0}, "--log-interval must be at least 1"),
        ({"vocab_size": None}, "needs --vocab-size"),
        ({"max_bad_lines": 5}, "add --on-bad-line skip"),
        ({"max_bad_lines": -1, "on_bad_line": "skip"}, "must not be negative"),
        ({"validate_tokenizer": 1.5}, "0 to 1"),
        ({"keep_newlines": True}, "--keep-newlines needs --split-sentences"),
        ({"lang": "german"}, "--lang needs --split-sentences"),
        ({"lang": "klingon", "split_sentences": True}, "--lang klingon"),
        ({"rank": 0}, "needs --world-size"),
        ({"rank": 4, "world_size": 4}, "are 0 to 3"),
        ({"world_size": 0}, "--world-size must be at least 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenize("a.jsonl", "out", **options)


def test_option_has_a_second_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text('json_key = ["title"]\n')
    document = ("--config", str(tmp_path / "a.toml"))
    for more, keys in (
        (("--json-key", "a", "b"), ["a", "b"]),
        (("--json_key=c",), ["c"]),
        (document, ["title"]),
        ((*document, "--json-key", "d"), ["d"]),
    ):
        line = command("in", "out", "--vocab-size", "9", *more, "--dry-run")[3:]
        assert stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", argv=line) == 0
        assert tomllib.loads(capsys.readouterr().out)["json_keys"] == keys


# --- the command ------------------------------------------------------------------------------


def test_a_missing_input_and_a_bad_line_end_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "1"}\n{"text": \n')
    for name, words in (("none.jsonl", "none.jsonl"), ("bad.jsonl", "line 2 (byte 14)")):
        line = command(tmp_path / name, tmp_path / "out", "--vocab-size", "9", "--workers", "2")
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_launchers_rank_says_nothing_to_this_stage(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(3))
    launched = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    line = command(path, tmp_path / "out", "--vocab-size", "99")
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=launched)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.manifest.json").exists()


def _long_run(tmp_path: Path) -> subprocess.Popen[str]:
    """A run of two worker processes in the middle of its work."""
    row = json.dumps({"text": "1 2 3 4 5 6 7 8 9 " * 400}) + "\n"
    (tmp_path / "long.jsonl").write_text(row * 4000)
    line = command(tmp_path / "long.jsonl", tmp_path / "out", "--vocab-size", "99")
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("out.work/*/packs/0*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@pytest.mark.slow
def test_sigterm_stops_workers_promptly_with_nothing_published(tmp_path: Path) -> None:
    process = _long_run(tmp_path)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert time.monotonic() - began < 3
    assert not list(tmp_path.glob("out_*"))
    assert not (tmp_path / "out.manifest.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no worker processes")
def test_a_killed_worker_is_an_infrastructure_error_and_its_work_is_kept(tmp_path: Path) -> None:
    process = _long_run(tmp_path)
    os.kill(_spawned(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "a worker process was killed by SIGKILL" in err
    assert not list(tmp_path.glob("out_*"))
    line = command(tmp_path / "long.jsonl", tmp_path / "out", "--vocab-size", "99")
    again = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "resuming: units_done=" in again.stderr


def _spawned(parent: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "spawn_main" in args]
