"""How a person says where data lies."""

from __future__ import annotations

from typing import Any

import pytest

from trainyard.config import digest_relevant
from trainyard.datasets.config import DataConfig, Source, parse_blend, parse_split
from trainyard.errors import ConfigError


def test_split_is_relative() -> None:
    assert parse_split("969, 30, 1") == [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert parse_split("9,1") == [(0.0, 0.9), (0.9, 1.0), (1.0, 1.0)]
    assert parse_split("100") == [(0.0, 1.0), (1.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("split", ["", "1,2,3,4", "0,0,0", "a,b", "-1,2", "1..2"])
def test_an_invalid_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(split)


def test_a_blend_has_weights_for_all_or_none() -> None:
    assert parse_blend(("a",), "--data-path") == [Source("a", None)]
    assert parse_blend(("a", "b"), "--data-path") == [Source("a", None), Source("b", None)]
    assert parse_blend(("2", "a", "1e-1", "b"), "--data-path") == [
        Source("a", 2.0),
        Source("b", 0.1),
    ]
    for paths in [("1", "a", "b"), ("1", "a", "b", "c"), ("1", "2")]:
        with pytest.raises(ConfigError, match="--data-path"):
            parse_blend(paths, "--data-path")


def test_a_file_in_place_of_a_prefix_is_refused_with_the_prefix() -> None:
    with pytest.raises(ConfigError, match="give the prefix of the pair, x/corpus"):
        DataConfig(data_path=("x/corpus.bin",))


def test_data_path_and_paths_by_split_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        DataConfig(data_path=("a",), valid_data_path=("b",))
    with pytest.raises(ConfigError, match="--data-path is required"):
        DataConfig()


def test_a_weight_counts_as_part_of_the_input() -> None:
    inputs = DataConfig(data_path=("0.3", "a", "0.7", "b")).inputs()
    assert inputs == {"data_0 (weight 0.3)": ("a",), "data_1 (weight 0.7)": ("b",)}
    assert DataConfig(data_path=("a", "b")).inputs() == {"data_0": ("a",), "data_1": ("b",)}


@pytest.mark.parametrize(
    "options",
    [
        {"data_path": ("a",), "data_args_path": "list"},
        {"data_path": ("a",), "mock_data": True},
        {"train_data_path": ("a",), "per_split_data_args_path": "list.json"},
        {"data_args_path": "list", "per_split_data_args_path": "list.json"},
    ],
)
def test_data_lies_in_one_place(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"--.* and --.* exclude each other, as each names the data"
    ):
        DataConfig(**options)


@pytest.mark.parametrize("flag", ["multiple_validation_sets", "full_validation"])
def test_validation_sets_by_themselves_have_no_weights(flag: str) -> None:
    options: dict[str, Any] = {flag: True}
    message = f"--{flag.replace('_', '-')} .* without weights"
    with pytest.raises(ConfigError, match=message):
        DataConfig(train_data_path=("a",), valid_data_path=("1", "b", "2", "c"), **options)
    with pytest.raises(ConfigError, match=message):
        DataConfig(data_path=("1", "b", "2", "c"), **options)
    DataConfig(train_data_path=("1", "a", "2", "b"), valid_data_path=("b", "c"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "--num-workers must be at least 0"),
        ({"num_dataset_builder_threads": 0}, "--num-dataset-builder-threads must be at least 1"),
        ({"mid_level_dataset_surplus": -0.1}, "--mid-level-dataset-surplus must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(data_path=("a",), **options)


def test_made_up_data_is_no_input_and_is_cut_evenly() -> None:
    data = DataConfig(mock_data=True)
    assert data.inputs() == {}
    assert data.fractions("valid") == pytest.approx((1 / 3, 2 / 3))


def test_locations_and_speed_of_data_do_not_change_the_digest_of_a_run() -> None:
    one = DataConfig(data_args_path="a", data_cache_path="c", num_workers=3, mmap_bin_files=False)
    assert digest_relevant(one) == digest_relevant(DataConfig(data_path=("b",)))


def test_a_part_of_the_validation_data_may_be_measured() -> None:
    """As finetune_gpt.py of Megatron-LM's detoxification: 98,2,0 of --data-path2."""
    paths = {"train_data_path": ("a",), "valid_data_path": ("b",)}
    assert DataConfig(**paths).fractions("valid") == (0.0, 1.0)
    data = DataConfig(**paths, valid_data_split="98,2,0")
    assert data.fractions("valid") == pytest.approx((0.98, 1.0))
    assert data.fractions("train") == (0.0, 1.0)
    with pytest.raises(ConfigError, match="--valid-data-split 'x' must be up to three numbers"):
        DataConfig(**paths, valid_data_split="x")
    with pytest.raises(ConfigError, match="second part is what is measured, and it is empty"):
        DataConfig(**paths, valid_data_split="1,0,0")
    with pytest.raises(ConfigError, match="divides --valid-data-path, and that is not given"):
        DataConfig(data_path=("a",), valid_data_split="98,2,0")
    assert data.divided_by("valid") == "--valid-data-split '98,2,0'"
    assert data.divided_by("train") == "--split '969, 30, 1'"
