"""Memory of the whole command and its workers is a constant and 8 times the largest document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import Run, run_once
from tests.stages.tokenize_runs import command
from trainyard.corpus.indexed import read_index

CONSTANT = 450 << 20
MANY = 20_000_000
WORDS = b"the yard shunts every train of words onto the right track before dawn "


def tokenized(source: Path, shared: Path) -> Run:
    """A run of the command with GPT-2's tokenizer."""
    vocab = shared / "data/vocab/gpt2"
    line = command(source, source.with_name("out"))[:-1]
    files = ["--vocab-file", str(vocab / "vocab.json"), "--merge-file", str(vocab / "merges.txt")]
    return run_once([*line, "GPT2BPETokenizer", *files, "--append-eod"])


def short_lines(first: int, count: int) -> Iterator[bytes]:
    """A million lines at a time of about 50 bytes."""
    for start in range(first, first + count, 1_000_000):
        numbers = range(start, min(start + 1_000_000, first + count))
        yield b"".join(b'{"id": "d%d", "text": "a short text, %d"}\n' % (i, i) for i in numbers)


def write_short(path: Path, count: int) -> Path:
    with path.open("wb") as out:
        out.writelines(short_lines(0, count))
    return path


def write_long(path: Path, size_bytes: int, count: int = 1) -> Path:
    with path.open("wb") as out:
        for _ in range(count):
            out.write(b'{"text": "' + WORDS * (size_bytes // len(WORDS)) + b'"}\n{"text": "end"}\n')
    return path


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_documents(shared: Path, tmp_path: Path) -> None:
    few = tokenized(write_short(tmp_path / "few.jsonl", 1_000_000), shared)
    (tmp_path / "few.jsonl").unlink()
    many = tokenized(write_short(tmp_path / "many.jsonl", 3_000_000), shared)
    assert many.peak_bytes < few.peak_bytes + (40 << 20)
    assert many.peak_bytes < CONSTANT


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_memory_is_bounded_by_the_largest_document(
    shared: Path, tmp_path: Path, count: int
) -> None:
    size = 60_000_000
    run = tokenized(write_long(tmp_path / "long.jsonl", size, count), shared)
    assert run.peak_bytes < CONSTANT + 8 * size


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_million_documents(shared: Path, tmp_path: Path) -> None:
    run = tokenized(write_short(tmp_path / "many.jsonl", MANY), shared)
    assert run.peak_bytes < CONSTANT
    index = read_index(str(tmp_path / "out_text_document"), tmp_path)
    assert len(index.document_indices) == MANY + 1
    assert int(np.asarray(index.sequence_lengths).min()) > 3


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_document_of_500_megabytes(shared: Path, tmp_path: Path) -> None:
    run = tokenized(write_long(tmp_path / "long.jsonl", 500_000_000), shared)
    assert run.peak_bytes < CONSTANT + 8 * 500_000_000


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_file_of_two_gigabytes(shared: Path, tmp_path: Path) -> None:
    corpus = (shared / "data/corpora/corpus_en.jsonl").read_bytes()
    with (tmp_path / "large.jsonl").open("wb") as out:
        for _ in range(-(-(2 << 30) // len(corpus))):
            out.write(corpus)
    del corpus
    assert tokenized(tmp_path / "large.jsonl", shared).peak_bytes < CONSTANT
