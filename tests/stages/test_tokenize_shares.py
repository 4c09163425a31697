"""Fan-out: shares made by any ranks in any order, joined to the bytes of one run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from stages.runtime.cli import stage_main
from stages.tokenize.config import TokenizeConfig
from tests.stages.tokenize_runs import command, files, manifest, numbered, write
from trainyard.artifacts import store
from trainyard.corpus import unit_sizes

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 200)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files, of which each has bad lines."""
    for name, first in (("a", 0), ("b", 40)):
        path = write(tmp_path / f"in/{name}.jsonl", *numbered(40, first))
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[:13], "{\n", *lines[13:30], "[]\n", *lines[30:]]))
    return tmp_path / "in"


def run(source: Path | str, prefix: str, *more: str) -> int:
    """The command, in this process."""
    line = [*command(source, prefix, "--vocab-size", "1000", "--append-eod"), "--workers", "1"]
    arguments = [*line[3:], "--on-bad-line", "skip", *more]
    return stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", argv=arguments)


@pytest.mark.parametrize(("world_size", "unit_bytes"), [(1, 200), (3, 200), (4, 4000)])
def test_joined_shares_are_the_bytes_of_one_run(
    corpus: Path, tmp_path: Path, world_size: int, unit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", unit_bytes)  # 4,000 leaves two ranks no work
    whole, joined = str(tmp_path / "whole"), str(tmp_path / "joined")
    assert run(corpus, whole) == 0
    size = ("--world-size", str(world_size))
    for rank in reversed(range(world_size)):
        assert run(corpus, joined, "--rank", str(rank), *size) == 0
    shares = [manifest(f"{joined}.shares/{r:05d}-of-{world_size:05d}") for r in range(world_size)]
    assert run(corpus, joined, *size) == 0
    assert files(joined) == files(whole)
    listed = store.read_bytes(joined + ".bad_lines.jsonl")
    assert listed == store.read_bytes(whole + ".bad_lines.jsonl")
    assert len(listed.splitlines()) == 4
    one, other = manifest(whole), manifest(joined)
    assert one.output_digest == other.output_digest
    assert one.metrics == other.metrics
    sizes = [share.metrics["input_bytes"] for share in shares]
    assert sum(sizes) == one.metrics["input_bytes"]
    assert world_size == 1 or max(sizes) < sum(sizes)
    assert not Path(joined + ".shares").exists()
    assert run(corpus, joined, "--rank", "0", *size) == 0  # an array task that was tried again
    assert not Path(joined + ".shares").exists()
    assert run(corpus, joined, *size) == 0  # and again: nothing to do
    assert run(corpus, joined) == 0
    assert manifest(joined).run == other.run


def test_stores_are_alike(corpus: Path, store_url: str, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        data = (corpus / name).read_bytes()
        store.write_bytes(store.join(store_url, "in", name), data)
    prefix = store.join(store_url, "out/p")
    source = store.join(store_url, "in")
    for rank in ("0", "1"):
        assert run(source, prefix, "--rank", rank, "--world-size", "2") == 0
    assert run(source, prefix, "--world-size", "2") == 0
    assert run(corpus, str(tmp_path / "whole")) == 0
    assert files(prefix)[:2] == files(tmp_path / "whole")[:2]
    assert store.list_files(prefix + ".shares") == {}
    assert store.list_files(prefix + ".work") == {}


def test_a_share_that_is_done_is_not_done_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "out")
    for _ in range(2):
        assert run(corpus, prefix, "--rank", "1", "--world-size", "2") == 0
    assert "nothing to do" in capsys.readouterr().err


def test_whole_run_removes_abandoned_shares(corpus: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "out")
    assert run(corpus, prefix, "--rank", "1", "--world-size", "2") == 0
    assert Path(prefix + ".shares").exists()
    assert run(corpus, prefix) == 0
    assert not Path(prefix + ".shares").exists()
    assert Path(prefix + "_text_document.bin").exists()


def test_missing_shares_are_named_with_the_command_that_makes_them(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "out")
    assert run(corpus, prefix, "--rank", "1", "--world-size", "4") == 0
    assert run(corpus, prefix, "--world-size", "4") == 1
    log = capsys.readouterr().err
    assert "of 4 shares, those of rank 0, 2, 3 are not made yet" in log
    assert "--rank 0" in log
    assert not list(tmp_path.glob("out_*"))


def test_a_share_of_another_input_or_option_is_foreign(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "out")
    assert run(corpus, prefix, "--rank", "0", "--world-size", "2") == 0
    other = ("--rank", "1", "--world-size", "2", "--no-append-eod")
    assert run(corpus, prefix, *other) == 0
    assert run(corpus, prefix, "--world-size", "2") == 1
    log = capsys.readouterr().err
    assert "those of rank 1 are made of other inputs or other options" in log
    assert run(corpus, prefix, "--rank", "1", "--world-size", "2") == 0
    assert run(corpus, prefix, "--world-size", "2") == 0


def test_bad_lines_of_all_ranks_count(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "out")
    limit = ("--world-size", "2", "--max-bad-lines", "3")
    for rank in ("0", "1"):
        assert run(corpus, prefix, "--rank", rank, *limit) == 0
    assert run(corpus, prefix, *limit) == 1
    assert "b.jsonl: line 32 (byte " in capsys.readouterr().err
    assert not list(tmp_path.glob("out_*"))


def test_a_file_listed_twice_is_not_fanned_out(corpus: Path, tmp_path: Path) -> None:
    twice = ["--input", str(corpus / "a.jsonl"), str(corpus / "a.jsonl")]
    line = command("", tmp_path / "out", "--vocab-size", "1000", "--world-size", "2", "--rank", "0")
    assert stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", argv=line[5:] + twice) == 2


def test_ranks_run_at_once(tmp_path: Path) -> None:
    rows = [{"text": "1 2 3 4 5 6 7 8 9 " * 400}] * 600
    path = write(tmp_path / "a.jsonl", *rows)
    line = command(path, tmp_path / "out", "--vocab-size", "99", "--world-size", "2")
    ranks = [
        subprocess.Popen([*line, "--rank", str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "out.manifest.json").read_text())["metrics"]
    assert metrics["documents"] == 600


def test_files_of_other_keys_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "1 2", "title": "3"})
    prefix = str(tmp_path / "out")
    assert run(source, prefix) == 0
    assert run(source, prefix, "--json-keys", "title") == 2
    assert "_text_document.bin of an earlier run" in capsys.readouterr().err
    assert Path(prefix + "_text_document.bin").exists()
    assert run(source, prefix, "--json-keys", "text", "title") == 0
    assert run(source, prefix, "--json-keys", "title", "--force") == 0
    assert not Path(prefix + "_text_document.bin").exists()
