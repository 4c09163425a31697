"""Memory of the whole command and its workers is a constant and 8 times the largest document."""

from __future__ import annotations

import shutil
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


# What a process held at its most is counted for those that it starts: files are made in pieces.


def write_short(path: Path, count: int) -> Path:
    """Lines of about 50 bytes. Their words repeat, as those of a language do: the engine remembers
    words, up to some hundred megabytes, which is not what is looked at here."""
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
def test_memory_is_bounded_by_the_largest_document(
    shared: Path, tmp_path: Path, count: int
) -> None:
    size = 60_000_000
    run = tokenized(write_long(tmp_path / "long.jsonl", size, count), shared)
    assert run.peak_bytes < CONSTANT + 8 * size


@pytest.mark.full
@pytest.mark.parametrize("letters", [b"x", b"ACGT"])
def test_memory_is_bounded_for_one_unbroken_word(
    shared: Path, tmp_path: Path, letters: bytes
) -> None:
    size = 60_000_000
    chosen = np.random.default_rng(0).integers(0, len(letters), size)
    word = np.frombuffer(letters, np.uint8)[chosen].tobytes()
    (tmp_path / "word.jsonl").write_bytes(b'{"text": "' + word + b'"}\n')
    run = tokenized(tmp_path / "word.jsonl", shared)
    assert run.peak_bytes < CONSTANT + 8 * size


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_million_documents(shared: Path, tmp_path: Path) -> None:
    run = tokenized(write_short(tmp_path / "many.jsonl", MANY), shared)
    assert run.peak_bytes < CONSTANT
    index, _ = read_index(str(tmp_path / "out_text_document"))
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
    corpus = shared / "data/corpora/corpus_en.jsonl"
    with (tmp_path / "large.jsonl").open("wb") as out:
        while out.tell() < 2 << 30:
            with corpus.open("rb") as source:
                shutil.copyfileobj(source, out)
    assert tokenized(tmp_path / "large.jsonl", shared).peak_bytes < CONSTANT
