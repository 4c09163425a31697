"""Ids outside the vocabulary are found: in a part of a file when it is opened, in every sample
when it is gathered, and named by file, document, place and sample."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.datasets import vocabulary
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.form import SampleFormat
from trainyard.datasets.vocabulary import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    check_sample,
    check_tokens,
)
from trainyard.errors import DataError

VOCABULARY = 1000


def pair(
    prefix: Path,
    num_tokens: int,
    wrong: dict[int, int],
    dtype: type = np.int32,
    per_document: int = 100,
) -> str:
    """Documents of `per_document` tokens, in two sequences each; `wrong`: place -> id."""
    tokens = np.arange(num_tokens) % VOCABULARY
    for place, token in wrong.items():
        tokens[place] = token
    with open(f"{prefix}.bin", "wb") as data, open(f"{prefix}.idx", "wb") as index:
        writer = IndexedWriter(data, dtype)
        half = per_document // 2
        for begin in range(0, num_tokens, per_document):
            document = tokens[begin : begin + per_document].astype(dtype)
            writer.add_document([document[:half], document[half:]])
        writer.write_index(index)
    return str(prefix)


@pytest.mark.parametrize("way", ["auto", "file"])
@pytest.mark.parametrize("token", [VOCABULARY, 50256, -1])
def test_a_file_is_refused_when_it_is_opened(tmp_path: Path, way: str, token: int) -> None:
    prefix = pair(tmp_path / "t", 1000, {999: token})
    with pytest.raises(DataError) as refused:
        check_tokens(IndexedDataset(prefix, way), VOCABULARY)  # type: ignore[arg-type]
    text = str(refused.value)
    assert re.search(rf"t: token {token} in document 9 at place 99 ", text), text
    assert "the vocabulary of 1000 (ids 0 to 999)" in text
    assert "--tokenizer-model" in text


def test_a_large_file_is_looked_at_all_over(tmp_path: Path) -> None:
    size = 3 * NUM_BLOCKS * BLOCK_TOKENS
    at_ends = dict.fromkeys(range(9999, size, 10000), 5000)  # ends of documents, as eod is
    prefix = pair(tmp_path / "t", size, at_ends, per_document=10_000)
    blocks = list(vocabulary._blocks(size, NUM_BLOCKS))
    assert blocks[0][0] == 0
    assert blocks[-1][1] == size
    assert sum(end - begin for begin, end in blocks) == size // 3
    with pytest.raises(DataError, match="token 5000 in document 0 at place 9999 "):
        check_tokens(IndexedDataset(prefix), VOCABULARY)


def test_what_is_right_or_cannot_be_wrong_passes(tmp_path: Path) -> None:
    check_tokens(IndexedDataset(pair(tmp_path / "t", 1000, {})), VOCABULARY)
    check_tokens(IndexedDataset(pair(tmp_path / "u", 1000, {5: 65535}, np.uint16)), 65536)
    check_tokens(IndexedDataset(pair(tmp_path / "v", 1000, {5: 9999})), 0)  # not known


def test_the_rest_is_found_when_it_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_TOKENS", 10)
    prefix = pair(tmp_path / "t", 10_000, {4321: 2000})
    form = SampleFormat(seq_length=32, seed=1, vocab_size=VOCABULARY, eod=0)
    data = DataConfig(data_path=(prefix,), split="1")
    train = build_datasets(data, form, (300, 0, 0)).train
    assert train is not None
    with pytest.raises(DataError) as refused:
        train.__getitems__(range(len(train)))
    words = r"t: token 2000 in document 43 at place 21 \(sample \d+\) is outside"
    assert re.search(words, str(refused.value)), refused.value


def test_a_sample_of_ones_own_is_looked_at_too() -> None:
    sample = {"tokens": np.array([1, 2, 3]), "labels": np.array([2, 3, 99])}
    check_sample(sample, 100, "train: sample 0")
    with pytest.raises(DataError, match="train: sample 0 has 99 among its labels at place 2"):
        check_sample(sample, 50, "train: sample 0")
