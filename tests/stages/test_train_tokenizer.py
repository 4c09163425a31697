"""The train_tokenizer stage: the same folder every time, for us and for transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.train_tokenizer.config import TrainTokenizerConfig
from stages.train_tokenizer.run import run
from tests.stages.directly import run_directly
from trainyard.errors import ConfigError, DataError
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

SENTENCE = "the yard shunts every train onto its track before the signal turns green again"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    words = SENTENCE.split()
    lines = [" ".join(words[i % 7 : i % 7 + 6]) + f" \u00e9{i % 10}" for i in range(400)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": line, "n": "x"}) + "\n" for line in lines))
    return path


def train(corpus: Path, folder: Path, **options: Any) -> dict[str, Any]:
    given = {"input": [str(corpus)], "output_dir": str(folder), "vocab_size": 300, **options}
    return run_directly(TrainTokenizerConfig, run, **given)


def command(corpus: Path, folder: Path, *more: str) -> list[str]:
    base = [sys.executable, "-m", "stages.train_tokenizer", "--input", str(corpus)]
    return [*base, "--output-dir", str(folder), *more]


def test_the_vocabulary_has_the_size_asked_for_and_every_byte(corpus: Path, tmp_path: Path) -> None:
    metrics = train(corpus, tmp_path / "tok")
    model = str(tmp_path / "tok")
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model)
    )
    assert metrics["vocab_size"] == tokenizer.vocab_size == 300
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"
    for text in (SENTENCE, "\x00\u4f60\u597d \U0001f680\n\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" the yard shunts")) < 8


@pytest.mark.slow
def test_same_corpus_gives_the_same_bytes_elsewhere(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path / "here")
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4"}
    environment["PYTHONHASHSEED"] = "7"
    line = command(corpus, tmp_path / "there", "--vocab-size", "300")
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


@pytest.mark.parametrize("lower_case", [True, False])
def test_word_pieces_are_those_of_a_bert(corpus: Path, tmp_path: Path, lower_case: bool) -> None:
    options = {"algorithm": "wordpiece", "vocab_size": 120, "lower_case": lower_case}
    metrics = train(corpus, tmp_path / "wp", **options)
    vocabulary = (tmp_path / "wp/vocab.txt").read_text().splitlines()
    assert metrics["vocab_size"] == len(set(vocabulary)) == len(vocabulary) <= 120
    assert vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type=kind, vocab_file=str(tmp_path / "wp/vocab.txt"), vocab_extra_ids=0
        )
    )
    unknown = vocabulary.index("[UNK]")
    pieces = tokenizer.encode(SENTENCE)
    assert unknown not in pieces
    assert len(pieces) < 2 * len(SENTENCE.split())
    upper = tokenizer.encode("TRAIN")
    assert (upper == tokenizer.encode("train")) if lower_case else (upper == [unknown])


@pytest.mark.slow
def test_word_pieces_do_not_depend_on_the_order_of_a_hash(tmp_path: Path) -> None:
    texts = [f"{i * 7919 % 1009:x} {i * 104729 % 997:o}" for i in range(3000)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    found = set()
    for run_number in range(4):  # the library seeds its hash maps anew each time
        folder = tmp_path / str(run_number)
        train(tmp_path / "texts.txt", folder, algorithm="wordpiece", vocab_size=400)
        found.add((folder / "vocab.txt").read_text())
    assert len(found) == 1


def test_transformers_loads_the_folder(corpus: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    train(corpus, tmp_path / "tok")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert len(tokenizer) == 300
    assert tokenizer.decode(tokenizer("the yard").input_ids) == "the yard"


def test_small_corpus_is_a_warning(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = train(corpus, tmp_path / "tok", vocab_size=5000)
    assert metrics["vocab_size"] < 5000
    assert "fewer than --vocab-size 5000" in caplog.text


def test_refusals(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--vocab-size must be at least 257"):
        train(corpus, tmp_path / "tok", vocab_size=256)
    with pytest.raises(ConfigError, match=r"at least 100 \(special tokens and characters\)"):
        train(corpus, tmp_path / "tok", algorithm="wordpiece", vocab_size=99)
    with pytest.raises(ConfigError, match="--input names no file"):
        train(corpus, tmp_path / "tok", input=[])
    with pytest.raises(DataError, match=r"corpus\.jsonl: line 1 .*no key 'body'"):
        train(corpus, tmp_path / "tok", json_keys=["body"])
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no document to learn from"):
        train(tmp_path / "none.jsonl", tmp_path / "tok")
    assert not (tmp_path / "tok").exists()


@pytest.mark.slow
def test_sigterm_stops_it_in_the_middle_of_training(tmp_path: Path) -> None:
    rows = (f"{i * 7919 % 100003} {i * 104729 % 999983:x}" for i in range(600_000))
    (tmp_path / "large.txt").write_text("\n".join(rows))
    line = command(tmp_path / "large.txt", tmp_path / "tok", "--vocab-size", "50000")
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert time.monotonic() - began < 3
    assert not (tmp_path / "tok/tokenizer.json").exists()
