"""The options of a Retro project, under Megatron-LM's keys and those of its guides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.project import options_of, read_project, with_neighbors, write_project

MEGATRON = {
    "retro_gpt_seed": 1234,
    "retro_gpt_data_path": ["0.5", "wiki", 1, "/far/books"],
    "retro_gpt_data_cache_path": None,
    "retro_gpt_split": "98,2,0",
    "retro_gpt_train_samples": 1003,
    "retro_gpt_eval_interval": 10,
    "retro_gpt_eval_iters": 5,
    "retro_gpt_tokenizer_type": "GPT2BPETokenizer",
    "retro_gpt_tokenizer_model": None,
    "retro_gpt_vocab_file": "tokenizer/vocab.json",
    "retro_gpt_merge_file": "s3://yard/merges.txt",
    "retro_gpt_seq_length": 2048,
    "retro_gpt_global_batch_size": 8,
    "retro_gpt_chunk_length": 64,
    "retro_block_size": 100000,
    "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
    "retro_bert_vocab_file": "tokenizer/bert.txt",
    "retro_neighbor_dirs": {"train": "train_abc", "valid": "query/valid_abc", "test": None},
}
"""As its tools write it."""


def write(folder: Path, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**MEGATRON, **more}))
    return str(folder)


def test_a_config_of_megatron_is_read_and_written_unchanged(tmp_path: Path) -> None:
    project = read_project(write(tmp_path))
    write_project(project)
    expected = {**MEGATRON, "retro_gpt_data_path": ["0.5", "wiki", "1", "/far/books"]}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == expected
    assert list(written) == list(MEGATRON)


def test_relative_names_are_below_the_project(tmp_path: Path) -> None:
    project, at = read_project(write(tmp_path)), str(tmp_path)
    assert project.prefixes() == [f"{at}/data/wiki", "/far/books"]
    assert project.data().data_path == ("0.5", f"{at}/data/wiki", "1.0", "/far/books")
    assert project.gpt_tokenizer().vocab_file == f"{at}/tokenizer/vocab.json"
    assert project.gpt_tokenizer().merge_file == "s3://yard/merges.txt"
    assert project.bert_tokenizer().vocab_file == f"{at}/tokenizer/bert.txt"
    assert project.neighbors("train") == f"{at}/query/train_abc"
    assert project.neighbors("valid") == f"{at}/query/valid_abc"
    with pytest.raises(ConfigError, match="retro_neighbor_dirs names no folder for test"):
        project.neighbors("test")
    assert with_neighbors(project, "test", "t").neighbors("test") == f"{at}/query/t"


def test_samples_are_counted_as_training_counts_them(tmp_path: Path) -> None:
    project = read_project(write(tmp_path))
    assert project.config.sizes() == (1003, (125 // 10 + 1) * 40, 40)


def test_the_keys_of_guides_mean_those_of_megatron(tmp_path: Path) -> None:
    guides = {
        "retro_bert_chunk_length": 256,
        "retro_bert_max_chunk_length": 256,
        "retro_num_neighbors": 2,
        "retro_num_neighbors_query": 2000,
        "retro_bert_batch_size": 512,
        "retro_index_str": "OPQ64,IVF4194304_HNSW32,PQ64",
        "retro_index_nprobe": 4096,
        "retro_index_load": False,
        "retro_index_train_load": False,
    }
    config = read_project(write(tmp_path, **guides)).config
    assert config.retro_bert_max_chunk_length == 256
    assert config.retro_query_num_neighbors_query == 2000
    assert config.retro_query_nprobe == 4096
    assert config.num_neighbors == 2
    assert options_of(guides, "guide")["retro_query_nprobe"] == 4096


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"retro_gpt_chunk_lenght": 64}, "'retro_gpt_chunk_lenght'; did you mean 'retro_gpt_chunk"),
        ({"retro_neighbor_dirs": {"trian": "x"}}, "split 'trian'; did you mean 'train'"),
        ({"retro_gpt_seq_length": "2048"}, "retro_gpt_seq_length must be a whole number"),
        ({"retro_gpt_data_path": []}, "retro_gpt_data_path names no token files"),
        ({"retro_gpt_split": "a"}, "retro_gpt_split 'a' must be"),
        (
            {"retro_query_nprobe": 1, "retro_index_nprobe": 2},
            "retro_index_nprobe 2 and retro_query_nprobe 1 are one option",
        ),
        ({"retro_gpt_train_samples": None}, "retro_gpt_train_samples must be|is required"),
    ],
)
def test_what_no_project_has_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_project(write(tmp_path, **more))


def test_a_folder_that_is_no_project_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"config\.json is missing: not the folder of a Retro"):
        read_project(str(tmp_path))
