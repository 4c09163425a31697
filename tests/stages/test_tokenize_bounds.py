"""Memory of tokenize: a constant and 8 times the largest document (40 times without a seam)."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import Run, run_once
from tests.stages.tokenize_runs import command
from trainyard.corpus.indexed import read_index

CONSTANT = 450 << 20
UNCUT_PER_BYTE = 40
UNCUT_FREE_BYTES = 1 << 20
MANY = 20_000_000
WORDS = b"the yard shunts every train of words onto the right track before dawn "


TOKENIZERS = {
    "gpt2": ("GPT2BPETokenizer", {"vocab": "gpt2/vocab.json", "merge": "gpt2/merges.txt"}),
    "llama2": ("Llama2Tokenizer", {"model": "llama2/tokenizer.model"}),
    "bert": ("BertWordPieceLowerCase", {"vocab": "bert/bert-base-uncased-vocab.txt"}),
    "unigram": ("GPTSentencePieceTokenizer", {"model": "sentencepiece/spm-test.model"}),
}
FLAGS = {"vocab": "--vocab-file", "merge": "--merge-file", "model": "--tokenizer-model"}


def tokenized(source: Path, shared: Path, kind: str = "gpt2", *options: str) -> Run:
    """A run of the command with one of the tokenizers."""
    name, files = TOKENIZERS[kind]
    line = [*command(source, source.with_name("out"))[:-1], name, "--append-eod", *options]
    for part, file in files.items():
        line += [FLAGS[part], str(shared / "data/vocab" / file)]
    return run_once(line)


# What a process held at its most is counted for those that it starts: files are made in pieces.


def write_short(path: Path, count: int) -> Path:
    """Lines of about 50 bytes. Their words repeat, as those of a language do: the engine remembers
    words, up to some hundred megabytes, which is not measured here."""
    lot = 100_000
    with path.open("wb") as out:
        for start in range(0, count, lot):
            rows = (b'{"id": "d%d", "text": "short, %d"}\n' % (i, i % 1000) for i in range(lot))
            out.write(b"".join(rows).replace(b'"d', b'"%d-' % start))
    return path


def write_long(path: Path, size_bytes: int, count: int = 1) -> Path:
    """Documents of a size, each followed by a short one."""
    piece = WORDS * 10_000
    with path.open("wb") as out:
        for _ in range(count):
            out.write(b'{"text": "')
            for _ in range(size_bytes // len(piece)):
                out.write(piece)
            out.write(b'"}\n{"text": "end"}\n')
    return path


@pytest.mark.full  # the sum over a tree of processes that is sampled on a busy machine is noisy
def test_memory_does_not_grow_with_the_number_of_documents(shared: Path, tmp_path: Path) -> None:
    few = tokenized(write_short(tmp_path / "few.jsonl", 1_000_000), shared)
    (tmp_path / "few.jsonl").unlink()
    many = tokenized(write_short(tmp_path / "many.jsonl", 3_000_000), shared)
    assert many.peak_bytes < few.peak_bytes + (40 << 20)
    assert many.peak_bytes < CONSTANT


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 3])
def test_memory_follows_the_largest_document(shared: Path, tmp_path: Path, count: int) -> None:
    size = 60_000_000
    run = tokenized(write_long(tmp_path / "long.jsonl", size, count), shared)
    assert run.peak_bytes < CONSTANT + 8 * size


def write_row(path: Path, letters: str, size_bytes: int) -> Path:
    """One document of a word, and then these letters in any order."""
    points = np.array([ord(letter) for letter in letters], np.uint32)
    count = size_bytes // len(letters[0].encode())
    chosen = points[np.random.default_rng(0).integers(0, len(points), count)]
    row = chosen.tobytes().decode("utf-32-le").encode()
    path.write_bytes(b'{"text": "so ' + row + b'"}\n')
    return path


ROWS = {
    "genome": "ACGT",
    "dashes": "-",
    "blanks": " ",
    "ideographs": "\u4e00\u4f60\u597d\u4e16\u754c",
}
UNCUT = [
    *((kind, name) for kind in ("gpt2", "llama2") for name in ROWS),
    *(("bert", "genome"), ("unigram", "genome")),
]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "name"), UNCUT)
def test_memory_is_bounded_for_one_word(shared: Path, tmp_path: Path, kind: str, name: str) -> None:
    size = 20_000_000
    run = tokenized(write_row(tmp_path / "word.jsonl", ROWS[name], size), shared, kind)
    assert run.peak_bytes < CONSTANT + UNCUT_PER_BYTE * (size - UNCUT_FREE_BYTES)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_million_documents(shared: Path, tmp_path: Path) -> None:
    run = tokenized(write_short(tmp_path / "many.jsonl", MANY), shared)
    assert run.peak_bytes < CONSTANT
    index = read_index(str(tmp_path / "out_text_document"))
    assert len(index.document_indices) == MANY + 1
    assert int(np.asarray(index.sequence_lengths).min()) > 3


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_document_of_500_megabytes(shared: Path, tmp_path: Path) -> None:
    source = write_long(tmp_path / "long.jsonl", 500_000_000)
    run = tokenized(source, shared, "gpt2", "--max-document-bytes", "500000000")
    assert run.peak_bytes < CONSTANT + 8 * 500_000_000


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_file_of_two_gigabytes(shared: Path, tmp_path: Path) -> None:
    corpus = shared / "data/corpora/corpus_en.jsonl"
    with (tmp_path / "large.jsonl").open("wb") as out:
        while out.tell() < 2 << 30:
            with corpus.open("rb") as source:
                shutil.copyfileobj(source, out)
    assert tokenized(tmp_path / "large.jsonl", shared).peak_bytes < CONSTANT


@pytest.mark.full
def test_line_of_gigabytes_in_a_small_file_is_refused(tmp_path: Path, shared: Path) -> None:
    source = tmp_path / "bomb.jsonl.gz"
    with gzip.open(source, "wb", 1) as out:
        for _ in range(1500):
            out.write(b"x" * 1_000_000)
        out.write(b'\n{"text": "end"}\n')
    with pytest.raises(RuntimeError, match=r"byte 0\): the line has more than 268435456 bytes"):
        tokenized(source, shared)
    run = tokenized(source, shared, "gpt2", "--on-bad-line", "skip")
    assert run.peak_bytes < CONSTANT + 2 * (256 << 20)
    assert run.wall_seconds < 60
