"""Splits and blends of real token files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trainyard.datasets.test_gpt import FORM, write_pair
from trainyard.datasets.build import build_gpt_datasets, split_documents
from trainyard.datasets.config import DataConfig
from trainyard.datasets.gpt import SampleFormat
from trainyard.errors import ConfigError, DataError


def test_splits_do_not_share_documents() -> None:
    bounds = [split_documents(1003, b) for b in ((0.0, 0.969), (0.969, 0.999), (0.999, 1.0))]
    assert np.concatenate(bounds).tolist() == list(range(1003))


def test_blend_keeps_shares_and_ids_name_the_source(tmp_path: Path) -> None:
    paths = ("3", write_pair(tmp_path / "a", [400]), "1", write_pair(tmp_path / "b", [400], 500))
    data = DataConfig(data_path=paths, split="1,0,0")
    train, valid, test = build_gpt_datasets(data, FORM, (40, 0, 0))
    assert train is not None
    assert valid is None
    assert test is None
    ids = train.ids(np.arange(40))
    assert np.bincount(ids[:, 0]).tolist() == [30, 10]
    assert len({tuple(i) for i in ids[:20].tolist()}) == 20


def test_prefixes_without_weights_are_one_epoch(tmp_path: Path) -> None:
    paths = (write_pair(tmp_path / "a", [400]), write_pair(tmp_path / "b", [100], 500))
    data = DataConfig(data_path=paths, split="1,0,0")
    train, _, _ = build_gpt_datasets(data, FORM, (30, 0, 0))
    assert train is not None
    assert len({tuple(i) for i in train.ids(np.arange(30)).tolist()}) == 30
    with pytest.raises(ConfigError, match="one epoch, 30 train samples"):
        build_gpt_datasets(data, FORM, (31, 0, 0))


def test_an_empty_or_too_small_split_is_refused_in_words(tmp_path: Path) -> None:
    data = DataConfig(data_path=(write_pair(tmp_path / "t", [100] * 9 + [10]),))
    with pytest.raises(ConfigError, match=r"the valid split .* holds none of the 10 documents"):
        build_gpt_datasets(data, FORM, (10, 10, 0))
    data = DataConfig(data_path=data.data_path, split="9,1,0")
    with pytest.raises(ConfigError, match="10 tokens in 1 documents, less than one sample"):
        build_gpt_datasets(data, FORM, (10, 10, 0))
    data = DataConfig(train_data_path=data.data_path)
    with pytest.raises(ConfigError, match="--valid-data-path is not given"):
        build_gpt_datasets(data, FORM, (10, 10, 0))


def test_a_token_outside_the_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "t", [500])
    form = SampleFormat(seq_length=16, seed=1, vocab_size=100, eod=99)
    train, _, _ = build_gpt_datasets(DataConfig(data_path=(prefix,), split="1"), form, (30, 0, 0))
    assert train is not None
    with pytest.raises(DataError, match=r"t: token [0-9]{3} in .* outside the vocabulary of 100"):
        [train[i] for i in range(len(train))]
