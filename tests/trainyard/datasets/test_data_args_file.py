"""Prefixes that stand in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.datasets.test_gpt import FORM, write_pair
from trainyard.datasets.build import build_gpt_datasets
from trainyard.datasets.config import DataConfig
from trainyard.errors import ConfigError


def test_a_list_in_a_file_is_the_same_as_options(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("0.3 a\n\t0.7   b\r\n")
    data = DataConfig(data_args_path=str(listed), split="9,1")
    options = DataConfig(data_path=("0.3", "a", "0.7", "b"), split="9,1")
    assert data.expanded() == options
    assert data.inputs() == options.inputs()
    assert options.expanded() is options


def test_lists_by_split_are_the_same_as_options(tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps({"train": [1, "a", 0.5, "b"], "valid": ["c", "d"], "test": None}))
    data = DataConfig(per_split_data_args_path=str(listed))
    options = DataConfig(train_data_path=("1", "a", "0.5", "b"), valid_data_path=("c", "d"))
    assert data.expanded() == options
    assert data.inputs() == options.inputs()


def test_what_the_files_list_is_built(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(write_pair(tmp_path / "t", [400]))
    data = DataConfig(data_args_path=str(listed), split="1")
    train, _, _ = build_gpt_datasets(data, FORM, (10, 0, 0))
    assert train is not None
    assert len(train) == 24


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty; list the values of --data-path in it"),
        (b"1 a b", "give every prefix a weight"),
        (b"a.bin", "give the prefix of the pair, a"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (None, "the file does not exist"),
    ],
)
def test_a_broken_list_is_refused(tmp_path: Path, text: bytes | None, message: str) -> None:
    listed = tmp_path / "list"
    if text is not None:
        listed.write_bytes(text)
    data = DataConfig(data_args_path=str(listed))
    with pytest.raises(ConfigError, match=f"--data-args-path {listed}.*{message}"):
        data.inputs()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not a JSON document"),
        (["a"], "must be a JSON object"),
        ({"train": ["a"], "validation": ["b"]}, "unknown key 'validation'; known are train, valid"),
        ({"train": "a b"}, "'train' must be a list"),
        ({"train": ["a", True]}, "contains True, which is neither a weight nor a prefix"),
        ({"valid": ["a"]}, "--data-path is required"),
        ({"train": [1, "a", "b"]}, "give every prefix a weight"),
    ],
)
def test_broken_lists_by_split_are_refused(tmp_path: Path, document: Any, message: str) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(ConfigError, match=f"--per-split-data-args-path {listed}.*{message}"):
        DataConfig(per_split_data_args_path=str(listed)).expanded()


def test_weights_in_a_list_meet_the_same_rules(tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps({"train": ["a"], "valid": [1, "b", 2, "c"]}))
    data = DataConfig(per_split_data_args_path=str(listed), full_validation=True)
    with pytest.raises(ConfigError, match="--full-validation cannot weight validation data"):
        data.expanded()
