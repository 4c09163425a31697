"""Splits and blends of real token files, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainyard.datasets.test_gpt import FORM, write_pair
from trainyard.datasets.build import (
    build_datasets,
    build_gpt_datasets,
    set_names,
)
from trainyard.datasets.config import DataConfig, Source
from trainyard.datasets.gpt import BlendedDataset, GPTDataset, SampleFormat
from trainyard.datasets.splits import split_documents
from trainyard.errors import ConfigError, DataError


def test_splits_do_not_share_documents() -> None:
    bounds = [split_documents(1003, b) for b in ((0.0, 0.969), (0.969, 0.999), (0.999, 1.0))]
    assert np.concatenate(bounds).tolist() == list(range(1003))


def test_more_sequences_than_ids_of_32_bits_are_refused_in_words() -> None:
    last = split_documents(2**31, (1 - 2**-31, 1.0))
    assert [*last] == [2**31 - 1]
    with pytest.raises(DataError, match=r"at most 2147483648 sequences of a pair.*several pairs"):
        split_documents(2**31 + 1, (1 - 2**-31, 1.0))


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


def test_an_empty_or_too_small_split_is_refused(tmp_path: Path) -> None:
    data = DataConfig(data_path=(write_pair(tmp_path / "t", [100] * 9 + [10]),))
    with pytest.raises(ConfigError, match=r"the valid split .* has none of the 10 documents"):
        build_gpt_datasets(data, FORM, (10, 10, 0))
    data = DataConfig(data_path=data.data_path, split="9,1,0")
    with pytest.raises(ConfigError, match="10 tokens in 1 documents, less than one sample"):
        build_gpt_datasets(data, FORM, (10, 10, 0))
    data = DataConfig(train_data_path=data.data_path)
    with pytest.raises(ConfigError, match="--valid-data-path is not given"):
        build_gpt_datasets(data, FORM, (10, 10, 0))


def test_a_token_outside_the_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "t", [500])
    sample_format = SampleFormat(seq_length=16, seed=1, vocab_size=100, eod=99)
    data = DataConfig(data_path=(prefix,), split="1")
    with pytest.raises(DataError, match=r"t: token [0-9]{3} in .* outside the vocabulary of 100"):
        build_gpt_datasets(data, sample_format, (30, 0, 0))


def test_a_blend_is_as_long_as_its_shares_rounded_up(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / name, [900]) for name in "abc"]
    paths = tuple(word for prefix in prefixes for word in ("1", prefix))
    for threads in (1, 3):
        data = DataConfig(data_path=paths, split="1", num_dataset_builder_threads=threads)
        train, _, _ = build_gpt_datasets(data, FORM, (40, 0, 0))
        assert isinstance(train, BlendedDataset)
        assert len(train) == 3 * 14
        assert [source.indexed.prefix for source in train.datasets] == prefixes


def test_a_surplus_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("1", write_pair(tmp_path / "a", [400]), "1", write_pair(tmp_path / "b", [400]))
    data = DataConfig(data_path=paths, split="1", mid_level_dataset_surplus=0.0)
    monkeypatch.setattr(GPTDataset, "__len__", lambda self: 3)
    with pytest.raises(ConfigError, match=r"takes 5 train samples .* --mid-level-dataset-surplus"):
        build_gpt_datasets(data, FORM, (10, 0, 0))


def test_a_lone_prefix_of_a_split_needs_no_blend_whatever_its_weight(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "t", [400])
    apart = DataConfig(train_data_path=("1", prefix), valid_data_path=("1", prefix))
    train, valid, _ = build_gpt_datasets(apart, FORM, (10, 10, 0))
    assert isinstance(train, GPTDataset)
    assert isinstance(valid, GPTDataset)
    cut, _, _ = build_gpt_datasets(DataConfig(data_path=("1", prefix), split="1"), FORM, (10, 0, 0))
    assert isinstance(cut, BlendedDataset)


# --- validation -------------------------------------------------------------------------------


def test_each_validation_set_is_built_by_itself_and_named(tmp_path: Path) -> None:
    sets = tuple(write_pair(tmp_path / name, [100]) for name in ("news", "code"))
    data = DataConfig(
        train_data_path=(write_pair(tmp_path / "t", [400]),),
        valid_data_path=sets,
        multiple_validation_sets=True,
    )
    built = build_datasets(data, FORM, (2, 30, 0))
    assert [name for name, _ in built.valid] == ["news", "code"]
    assert all(len(dataset) >= 30 for _, dataset in built.valid)
    with pytest.raises(ConfigError, match="--multiple-validation-sets"):
        build_gpt_datasets(data, FORM, (2, 30, 0))


def test_validation_sets_can_be_the_splits_of_the_training_data(tmp_path: Path) -> None:
    paths = tuple(write_pair(tmp_path / name, [90, 90]) for name in "xy")
    data = DataConfig(data_path=paths, split="1, 1, 0", multiple_validation_sets=True)
    built = build_datasets(data, FORM, (2, 5, 0))
    assert [name for name, _ in built.valid] == ["x", "y"]
    for _, dataset in built.valid:
        assert isinstance(dataset, GPTDataset)
        assert set(dataset.indices.document_index.tolist()) == {1}


def test_names_of_sets_tell_them_apart() -> None:
    sources = [Source(prefix, None) for prefix in ("a/x", "b/x", "b/y", "a/x", "s3://z/w/")]
    assert set_names(sources) == ["a/x#0", "b/x", "y", "a/x#3", "w"]


@pytest.mark.parametrize("drop", [True, False])
def test_full_validation_is_one_epoch(tmp_path: Path, drop: bool) -> None:
    sets = (write_pair(tmp_path / "a", [100]), write_pair(tmp_path / "b", [40], 500))
    data = DataConfig(
        train_data_path=sets,
        valid_data_path=sets,
        full_validation=True,
        drop_last_partial_validation_sequence=drop,
    )
    built = build_datasets(data, FORM, (1, 1, 0))
    ((name, valid),) = built.valid
    assert name == "valid"
    labels = np.concatenate(
        [valid[i]["labels"][valid[i]["loss_mask"] > 0] for i in range(len(valid))]
    )
    every = [*range(1, 100), *range(501, 540)]
    assert sorted(labels) == sorted(every if not drop else [*range(1, 97), *range(501, 533)])
    assert built.train is not None
    assert len(built.train) == 1


def test_a_short_validation_set_is_served_if_nothing_is_dropped(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "t", [9])
    data = DataConfig(
        train_data_path=(write_pair(tmp_path / "u", [90]),),
        valid_data_path=(prefix,),
        full_validation=True,
        drop_last_partial_validation_sequence=False,
    )
    ((_, valid),) = build_datasets(data, FORM, (1, 1, 0)).valid
    assert len(valid) == 1
    assert valid[0]["loss_mask"].sum() == 8


# --- made-up data -----------------------------------------------------------------------------


def test_mock_data_needs_no_files_and_gives_each_split_a_third() -> None:
    sample_format = SampleFormat(64, 1, 50000, 49999)
    built = build_datasets(
        DataConfig(mock_data=True, full_validation=True), sample_format, (10, 10, 10)
    )
    assert isinstance(built.train, GPTDataset)
    assert len(np.unique(built.train.indices.document_index)) == 33333
    ((_, valid),) = built.valid
    assert isinstance(valid, GPTDataset)
    assert valid.indices.document_index.min() == 33333
    sample = built.train[0]
    follows = (sample["labels"] == sample["tokens"] + 1) | (sample["labels"] == 49999)
    assert (follows | (sample["tokens"] == 49999)).all()


# --- test data --------------------------------------------------------------------------------


def test_too_little_test_data_only_skips_the_measurement(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "t", [100] * 9 + [10])
    for split, words in (
        ("7,3,0.001", "the test split .* has none of the 10 documents"),
        ("8,1,1", "the test split has 10 tokens in 1 documents, less than one sample"),
    ):
        data = DataConfig(data_path=(prefix,), split=split)
        built = build_datasets(data, FORM, (10, 4, 4))
        assert (len(built.valid), built.test) == (1, ()), split
        assert re.search(words, built.untested), split
    none = build_datasets(DataConfig(data_path=(prefix,), split="9,1,0"), FORM, (10, 0, 4))
    assert (none.test, none.untested) == ((), "")


def test_test_data_of_a_path_of_their_own_must_be_enough(tmp_path: Path) -> None:
    prefix, short = write_pair(tmp_path / "t", [100] * 9), write_pair(tmp_path / "s", [10])
    data = DataConfig(train_data_path=(prefix,), test_data_path=(short,))
    with pytest.raises(ConfigError, match="the test split has 10 tokens"):
        build_datasets(data, FORM, (10, 0, 4))
    assert build_datasets(data, FORM, (10, 0, 0)).test == ()
    without = build_datasets(DataConfig(train_data_path=(prefix,)), FORM, (10, 0, 4))
    assert (without.test, without.untested) == ((), "")


def test_several_test_sets_are_named_and_without_weights_at_most_one_epoch(tmp_path: Path) -> None:
    paths = (write_pair(tmp_path / "a", [400]), write_pair(tmp_path / "b", [100], 500))
    data = DataConfig(train_data_path=paths, test_data_path=paths)
    ((name, test),) = build_datasets(data, FORM, (10, 0, 1000)).test
    assert name == "test"
    assert len({tuple(i) for i in test.ids(np.arange(len(test))).tolist()}) == len(test) == 30
    sets = build_datasets(replace(data, multiple_validation_sets=True), FORM, (10, 0, 7)).test
    assert [name for name, _ in sets] == ["a", "b"]
    assert all(len(dataset) >= 7 for _, dataset in sets)
    with pytest.raises(
        ConfigError, match="--multiple-validation-sets cannot weight validation and test"
    ):
        replace(data, test_data_path=("0.5", paths[0]), multiple_validation_sets=True)


def test_a_last_batch_behind_the_data_of_a_run_has_data_made_for_it(tmp_path: Path) -> None:
    prefix, other = write_pair(tmp_path / "t", [400]), write_pair(tmp_path / "u", [400], 500)
    data = DataConfig(data_path=("1", prefix, "1", other), split="1")
    asked, more = (build_datasets(data, FORM, (20, 0, 0), num_consumed=n).train for n in (20, 24))
    assert (len(asked or ()), len(more or ())) == (20, 24)
    within = build_datasets(
        DataConfig(data_path=(prefix,), split="1"), FORM, (20, 0, 0), num_consumed=24
    )
    assert within.train is not None
    assert len(within.train) == 24, "one epoch, for any number"
    data = DataConfig(data_path=(prefix, other), split="1")
    with pytest.raises(ConfigError, match="one epoch, 48 train samples, but the run needs 50"):
        build_datasets(data, FORM, (48, 0, 0), num_consumed=50)
    cyclic = replace(data, dataloader_type="cyclic")
    assert len(build_datasets(cyclic, FORM, (48, 0, 0), num_consumed=50).train or ()) == 48
