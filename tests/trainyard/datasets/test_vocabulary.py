"""Ids outside the vocabulary are found in a file and in a sample, and named by their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainyard.corpus.token_files import write_tokens
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets import vocabulary
from trainyard.datasets.arrays import Arrays
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.index_cache import IndexCache
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.vocabulary import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    check_sample,
    check_tokens,
    largest,
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
    tokens, half = tokens.astype(dtype), per_document // 2
    documents = [tokens[i : i + per_document] for i in range(0, num_tokens, per_document)]
    return write_tokens(prefix, [[one[:half], one[half:]] for one in documents], dtype)


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


@pytest.mark.slow
def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 * NUM_BLOCKS * BLOCK_TOKENS
    monkeypatch.setattr(vocabulary, "WHOLE_TOKENS", size - 1)
    at_ends = dict.fromkeys(range(9999, size, 10000), 5000)  # ends of documents, as eod is
    prefix = pair(tmp_path / "t", size, at_ends, per_document=10_000)
    blocks = list(vocabulary._blocks(size, NUM_BLOCKS, BLOCK_TOKENS))
    assert blocks[0][0] == 0
    assert blocks[-1][1] == size
    assert sum(end - begin for begin, end in blocks) == size // 3
    with pytest.raises(DataError, match="token 5000 in document 0 at place 9999 "):
        check_tokens(IndexedDataset(prefix), VOCABULARY)


def test_valid_files_pass(tmp_path: Path) -> None:
    check_tokens(IndexedDataset(pair(tmp_path / "t", 1000, {})), VOCABULARY)
    check_tokens(IndexedDataset(pair(tmp_path / "u", 1000, {5: 65535}, np.uint16)), 65536)
    check_tokens(IndexedDataset(pair(tmp_path / "v", 1000, {5: 9999})), 0)  # not known


def test_other_wrong_ids_are_found_in_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_TOKENS", 10)
    monkeypatch.setattr(vocabulary, "WHOLE_TOKENS", 1000)
    prefix = pair(tmp_path / "t", 10_000, {4321: 2000})
    sample_format = SampleFormat(seq_length=32, seed=1, vocab_size=VOCABULARY, eod=0)
    data = DataConfig(data_path=(prefix,), split="1")
    train = build_datasets(data, sample_format, (300, 0, 0)).train
    assert train is not None
    with pytest.raises(DataError) as refused:
        train.__getitems__(range(len(train)))
    words = r"t: token 2000 in document 43 at place 21 \(sample \d+\) is outside"
    assert re.search(words, str(refused.value)), refused.value


def test_one_wrong_id_anywhere_in_a_file_that_is_looked_at_whole_is_found(tmp_path: Path) -> None:
    size = 3 * NUM_BLOCKS * BLOCK_TOKENS
    prefix = pair(tmp_path / "t", size, {4_000_123: 2000}, per_document=10_000)
    with pytest.raises(DataError, match="token 2000 in document 400 at place 123 "):
        check_tokens(IndexedDataset(prefix), VOCABULARY)


@pytest.mark.parametrize("token", [2000, -1])
def test_a_scan_ahead_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_TOKENS", 10)
    monkeypatch.setattr(vocabulary, "WHOLE_TOKENS", 1000)
    monkeypatch.setattr(vocabulary, "KEY_TOKENS", 10)
    monkeypatch.setattr(vocabulary, "SCAN_TOKENS", 999)

    class Ahead(IndexCache):
        def largest_token(self, facts: Mapping[str, Any], scan: Callable[[], Arrays]) -> Arrays:
            return self.arrays(facts, scan)

    sound = IndexedDataset(pair(tmp_path / "sound", 10_000, {}))
    file = IndexedDataset(pair(tmp_path / "t", 10_000, {4321: token}))
    cache = IndexCache(str(tmp_path / "cache"))
    for source in (sound, file):
        check_tokens(source, VOCABULARY, 1, cache)  # not known yet: samples are looked at
    ahead = Ahead(str(tmp_path / "cache"))
    check_tokens(file, 0, 1, ahead)  # a vocabulary is not known there
    with pytest.raises(DataError, match=f"token {token} in document 43 at place 21 "):
        check_tokens(file, VOCABULARY, 1, cache)
    check_tokens(sound, 0, 1, ahead)
    check_tokens(sound, VOCABULARY, 1, cache)
    with pytest.raises(DataError, match="token 999 "):
        check_tokens(sound, VOCABULARY - 1, 1, cache)


@pytest.mark.parametrize(
    ("tokens", "dtype", "place"),
    [
        ([3, 9, 1, 9, 0], np.int32, 1),
        ([3, 9, 1, 9, 0, -5], np.int32, 5),
        ([7, 65535, 65535], np.uint16, 1),
    ],
)
def test_the_largest_id_is_the_first_of_its_kind_and_a_negative_one_is_larger_still(
    tmp_path: Path, tokens: list[int], dtype: type, place: int
) -> None:
    assert largest(IndexedDataset(write_tokens(tmp_path / "t", [[tokens]], dtype))) == [place]


def test_a_sample_of_ones_own_is_looked_at_too() -> None:
    sample = {"tokens": np.array([1, 2, 3]), "labels": np.array([2, 3, 99])}
    check_sample(sample, 100, "train: sample 0")
    with pytest.raises(DataError, match="train: sample 0 has 99 among its labels at place 2"):
        check_sample(sample, 50, "train: sample 0")
