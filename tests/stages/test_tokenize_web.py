"""Tokenize what lies on a web server: corpus and tokenizer by URL."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.stages.directly import Done, run_program
from tests.stages.tokenize_runs import files, numbered, write
from tests.trainyard.tokenizers.fast.test_gigatoken import library
from tests.web import web_server
from trainyard.corpus import unit_sizes


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files and a tokenizer."""
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 500)
    path = write(tmp_path / "in/a.jsonl", *numbered(60))
    (tmp_path / "in/b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    document = json.loads(library().to_str())
    (tmp_path / "in/tokenizer.json").write_text(json.dumps(document))
    return tmp_path / "in"


def run(root: str | Path, prefix: Path, *names: str, expect: int | None = None) -> Done:
    inputs = [f"{root}/{name}" for name in names or ("a.jsonl", "b.jsonl.gz")]
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer")
    model = ("--tokenizer-model", f"{root}/tokenizer.json")
    words = ("--output-prefix", str(prefix), *tokenizer, *model, "--append-eod")
    return run_program("stages.tokenize", "--input", *inputs, *words, expect=expect)


@pytest.mark.slow
def test_web_corpus_gives_the_bytes_of_a_local_one(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "local", expect=0)
    with web_server(corpus) as root:
        run(root, tmp_path / "web", expect=0)
        assert files(tmp_path / "web")[:2] == files(tmp_path / "local")[:2]
        again = run(root, tmp_path / "web")
        assert (again.status, "nothing to do" in again.err) == (0, True)
        missing = run(root, tmp_path / "none", "c.jsonl")
        assert (missing.status, f"--input {root}/c.jsonl: no file" in missing.err) == (1, True)


@pytest.mark.parametrize(
    ("traits", "words"),
    [
        ({"ranges": False}, "does not serve parts of a file"),
        ({"ranges": False, "lengths": False}, "no Content-Length"),
    ],
)
def test_a_server_without_ranges_is_reported(
    corpus: Path, tmp_path: Path, traits: dict[str, bool], words: str
) -> None:
    with web_server(corpus, **traits) as root:
        done = run(root, tmp_path / "out", "a.jsonl", expect=1)
        assert words in done.err
        assert "Traceback" not in done.err
