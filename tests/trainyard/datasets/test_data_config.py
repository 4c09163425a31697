"""How a person says where data lies."""

from __future__ import annotations

import pytest

from trainyard.datasets.config import DataConfig, Source, parse_blend, parse_split
from trainyard.errors import ConfigError


def test_split_is_relative() -> None:
    assert parse_split("969, 30, 1") == [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert parse_split("9,1") == [(0.0, 0.9), (0.9, 1.0), (1.0, 1.0)]
    assert parse_split("100") == [(0.0, 1.0), (1.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("split", ["", "1,2,3,4", "0,0,0", "a,b", "-1,2", "1..2"])
def test_a_split_that_means_nothing_is_refused(split: str) -> None:
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
    with pytest.raises(ConfigError, match="not both"):
        DataConfig(data_path=("a",), valid_data_path=("b",))
    with pytest.raises(ConfigError, match="--data-path is required"):
        DataConfig()


def test_a_weight_counts_as_part_of_the_input() -> None:
    inputs = DataConfig(data_path=("0.3", "a", "0.7", "b")).inputs()
    assert inputs == {"data_0 (weight 0.3)": ("a",), "data_1 (weight 0.7)": ("b",)}
    assert DataConfig(data_path=("a", "b")).inputs() == {"data_0": ("a",), "data_1": ("b",)}
