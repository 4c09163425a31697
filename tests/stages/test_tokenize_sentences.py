"""Sentences: the manifest names the NLTK that cut them, another one runs again; BERT's [CLS]. The
same of the library of a tokenizer."""

from __future__ import annotations

import importlib.metadata
import logging
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from stages.runtime.cli import stage_main
from stages.tokenize import unit
from stages.tokenize.config import TokenizeConfig
from stages.train_tokenizer.config import TrainTokenizerConfig
from tests.stages.tokenize_runs import command, documents, files, manifest, tokenize, write
from tests.trainyard.tokenizers.fast.test_gigatoken import library
from trainyard.corpus import sentences
from trainyard.tokenizers.config import TokenizerConfig

ROOT = Path(__file__).resolve().parents[2]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "a", "!", "."]

PLAIN = (
    "0500060007000900080009000100030008000a000300",
    (
        "4d4d4944494458000001000000000000000804000000000000000400000000000000040000000200"
        "00000200000003000000000000000000000008000000000000000c00000000000000100000000000"
        "00000000000000000000030000000000000003000000000000000400000000000000"
    ),
)
FRAMED = (
    "02000500060007000900030002000800090003000200010003000300020008000a0003000300",
    (
        "4d4d4944494458000001000000000000000804000000000000000400000000000000060000000400"
        "0000040000000500000000000000000000000c0000000000000014000000000000001c0000000000"
        "00000000000000000000030000000000000003000000000000000400000000000000"
    ),
)
"""A .bin and an .idx."""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two documents, and a model of sentences that knows nothing of any word."""
    model = tmp_path / "nltk/tokenizers/punkt_tab/english"
    model.mkdir(parents=True)
    for name in ("abbrev_types.txt", "sent_starters.txt", "collocations.tab", "ortho_context.tab"):
        (model / name).write_bytes(b"")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setattr(unit, "_tools", {})  # kept by a process, which is one run otherwise
    return write(tmp_path / "a.jsonl", {"text": "1! 2! 3 4"}, {"text": "5! 6"})


def install(monkeypatch: pytest.MonkeyPatch, package: str, number: str) -> None:
    """As if another version were installed; it works as the one that is."""
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: number if name == package else version(name)
    )


@pytest.fixture
def another_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "nltk", "3.10.4")


def run(source: Path, prefix: Path, *more: str) -> int:
    line = command(source, prefix, "--split-sentences", "--workers", "1", *more)[3:]
    line[line.index("NullTokenizer")] = "ByteLevelTokenizer"
    return stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", argv=line)


# --- the version of NLTK ----------------------------------------------------------------------


def test_the_version_that_is_pinned_is_the_one_that_the_code_knows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"nltk=={sentences.NLTK}" in project["optional-dependencies"]["tokenize"]
    assert f"nltk=={sentences.NLTK}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.slow
def test_the_manifest_names_the_version_and_another_one_runs_again(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    prefix = tmp_path / "out"
    installed = sentences.nltk_version()
    assert run(corpus, prefix) == 0
    first = manifest(prefix)
    assert first.code["nltk"] == installed
    assert first.run["nltk"] == installed
    assert run(corpus, prefix) == 0
    assert "nothing to do" in capsys.readouterr().err
    request.getfixturevalue("another_nltk")
    unit._tools.clear()
    assert run(corpus, prefix) == 0
    log = capsys.readouterr().err
    assert f"running because the version of nltk changed ({installed} -> 3.10.4)" in log
    assert "NLTK 3.10.4 is installed, but trainyard is pinned to 3.10.0" in log
    second = manifest(prefix)
    assert second.code["nltk"] == "3.10.4"
    assert second.lineage != first.lineage  # unfinished work of the two is never mixed


@pytest.mark.usefixtures("another_nltk")
def test_a_run_that_splits_nothing_does_not_ask_for_nltk(corpus: Path, tmp_path: Path) -> None:
    line = command(corpus, tmp_path / "out", "--workers", "1")[3:]
    line[line.index("NullTokenizer")] = "ByteLevelTokenizer"
    assert stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", argv=line) == 0
    assert manifest(tmp_path / "out").code.keys() == {"version", "digest"}


@pytest.mark.parametrize(
    ("package", "kind", "options"),
    [
        ("tokenizers", "BertWordPieceCase", ("--vocab-file", "vocab.txt")),
        ("gigatoken", "HuggingFaceTokenizer", ("--tokenizer-model", "tokenizer.json")),
    ],
)
def test_another_version_of_a_library_that_encodes_runs_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    kind: str,
    options: tuple[str, str],
) -> None:
    source = write(tmp_path / "a.jsonl", {"text": "a! un"})
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB))
    (tmp_path / "tokenizer.json").write_text(library().to_str())
    line = command(source, tmp_path / "out", "--workers", "1")[3:]
    line += ["--tokenizer-type", kind, options[0], str(tmp_path / options[1])]

    def tokenize(*more: str) -> str:
        words = [*line, *more]
        assert stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", argv=words) == 0
        return capsys.readouterr().err

    installed = importlib.metadata.version(package)
    tokenize()
    first = manifest(tmp_path / "out")
    assert first.code[package] == installed
    assert "nothing to do" in tokenize()
    install(monkeypatch, package, "9.9.9")
    assert f"running because the version of {package} changed ({installed} -> 9" in tokenize()
    second = manifest(tmp_path / "out")
    assert second.code[package] == "9.9.9"
    assert second.lineage != first.lineage
    assert second.output_digest == first.output_digest


def test_a_run_without_gigatoken_does_not_ask_for_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="any")
    assert model.encoding_versions().keys() == {"tokenizers", "gigatoken"}
    slow = replace(model, use_gigatoken=False)
    assert slow.encoding_versions() == model.versions() == slow.versions()
    install(monkeypatch, "gigatoken", "9.9.9")
    assert model.encoding_versions()["gigatoken"] == "9.9.9"
    assert slow.encoding_versions().keys() == {"tokenizers"}


def test_a_trained_tokenizer_names_the_library_that_made_it() -> None:
    config = TrainTokenizerConfig(input=("a.jsonl",), output_dir="out")
    assert config.versions() == {"tokenizers": importlib.metadata.version("tokenizers")}


def test_a_share_of_another_version_is_not_joined(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    prefix = tmp_path / "out"
    assert run(corpus, prefix, "--rank", "0", "--world-size", "2") == 0
    request.getfixturevalue("another_nltk")
    assert run(corpus, prefix, "--rank", "1", "--world-size", "2") == 0
    assert run(corpus, prefix, "--world-size", "2") == 1
    found = f"of 2 shares, those of rank 0 are made with nltk {sentences.NLTK}, and this run has"
    assert f"{found} 3.10.4; run each" in capsys.readouterr().err


def test_pinned_version_has_no_warning(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sentences.SentenceSplitter()
    assert caplog.records == []


def test_no_nltk_at_all_is_refused_before_the_input_is_read(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    corpus.unlink()
    assert run(corpus, tmp_path / "out") == 2
    assert "--split-sentences needs the package nltk, which is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\u201cOne is here.\u201d Two is.", ["\u201cOne is here.\u201d Two is."]),
        ("\u00abOne is here.\u00bb Two is.", ["\u00abOne is here.\u00bb Two is."]),
        ("\u2018One?\u2019 Two is.", ["\u2018One?\u2019 Two is."]),
        ('"One is here." Two is.', ['"One is here."', "Two is."]),
    ],
)
def test_quotes_split_as_in_nltk_3_8_1(corpus: Path, text: str, expected: list[str]) -> None:
    """What NLTK 3.8.1 made of these, with this model."""
    assert sentences.SentenceSplitter().split(text) == expected


# --- BERT -------------------------------------------------------------------------------------


def test_bert_sentences_are_the_bytes_of_each_megatron(corpus: Path, tmp_path: Path) -> None:
    """The files that megatron-core 0.16.1 wrote of the ids that its tokenizer made of these
    sentences: without special tokens, its own default, and with them, that of main."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    source = write(tmp_path / "b.jsonl", {"text": "UNAFFABLE! A! b"}, {"text": ""}, {"text": "a."})
    given = {
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": str(tmp_path / "vocab.txt"),
        "vocab_size": None,
        "split_sentences": True,
        "append_eod": True,
    }
    tokenize(source, tmp_path / "plain", **given)
    tokenize(source, tmp_path / "framed", **given, tokenizer_hf_include_special_tokens=True)
    for prefix, expected in (("plain", PLAIN), ("framed", FRAMED)):
        found = files(tmp_path / prefix, "_text_sentence")
        assert tuple(data.hex() for data in found[:2]) == expected
    assert documents(tmp_path / "framed", "_text_sentence") == [
        [[2, 5, 6, 7, 9, 3], [2, 8, 9, 3], [2, 1, 3, 3]],
        [],
        [[2, 8, 10, 3, 3]],
    ]
