"""Options of reshard that exclude each other or are incomplete."""

from __future__ import annotations

from typing import Any

import pytest

from stages.reshard.config import ReshardConfig
from tests.stages.test_reshard import META
from trainyard.config import from_dict
from trainyard.errors import ConfigError

PER_STAGE = "target_num_layers_per_virtual_pipeline_stage"
STAGES = "target_num_virtual_stages_per_pipeline_rank"
FIRST = "target_decoder_first_pipeline_num_layers"
LAST = "target_decoder_last_pipeline_num_layers"
TWO_BY_TWO = {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}

FILES: list[tuple[dict[str, Any], str]] = [
    ({"num_shards": 0}, "--num-shards must be at least 1"),
    ({"save_dir": "run"}, "must not be the same folder or one inside the other"),
    ({"save_dir": "run/out"}, "must not be the same folder or one inside the other"),
    ({"target_tensor_parallel_size": 0}, "--target-tensor-parallel-size must be at least 1"),
    (
        {"target_expert_parallel_size": 2},
        "-expert-parallel-size 2 needs --saver core or torch_dist",
    ),
    ({"saver": "core", "num_shards": 2}, "--num-shards 2: --saver core writes one file for"),
    ({"vocab_file": "v"}, "--vocab-size and --vocab-extra-ids need --tokenizer-type"),
    ({"vocab_size": 9}, "--vocab-size and --vocab-extra-ids need --tokenizer-type"),
    ({"tokenizer_type": "Llama2Tokenizer"}, "Llama2Tokenizer needs --tokenizer-model"),
    ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "needs --merge-file"),
    ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer needs --vocab-size"),
    ({"saver_checkpoint_type": "meta"}, "--saver-checkpoint-type meta needs --saver llama_mis"),
    ({**META, "num_shards": 2}, "--num-shards 2: Meta's layout has one file for each tensor"),
    ({**META, "target_pipeline_parallel_size": 2}, "-size 2: Meta's layout has all layers in"),
]
PIPELINES: list[tuple[dict[str, Any], str]] = [
    ({PER_STAGE: 0}, "--target-num-layers-per-virtual-pipeline-stage must be at least 1"),
    ({STAGES: 0}, "--target-num-virtual-stages-per-pipeline-rank must be at least 1"),
    ({PER_STAGE: 1, STAGES: 2}, "exclude each other; give one"),
    (
        {STAGES: 2, "target_pipeline_parallel_size": None},
        "rank 2: virtual stages need several.* give --target-pipeline-parallel-size 2 or",
    ),
    (
        {PER_STAGE: 1, "saver": "torch_dist"},
        "needs --saver core or legacy; files of --saver torch_d",
    ),
    ({STAGES: 2, "saver": "trainyard"}, "needs --saver core or legacy; files of --saver trainy"),
    ({STAGES: 2, "saver": "hf"}, "files of --saver hf load at any number of stages"),
    ({FIRST: 0}, "--target-decoder-first-pipeline-num-layers must be at least 1"),
    ({LAST: 1, "saver": "legacy"}, "last-pip.* 1 needs --saver core; legacy models have"),
    ({LAST: 1, "saver": "torch_dist"}, "1 needs --saver core; files of --saver torch_dist"),
    ({LAST: 1, "target_pipeline_parallel_size": None}, "give --target-pipeline-parallel-size"),
    ({FIRST: 1, PER_STAGE: 1}, "does not apply; give --target-num-virtual-stages-per-pip"),
]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *FILES,
        *(({"saver": "core", **TWO_BY_TWO, **options}, words) for options, words in PIPELINES),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReshardConfig(**{"load_dir": "run", "save_dir": "out", **options})


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"tokenizer_model": "t.model"}, "Llama2Tokenizer"),
        ({"tokenizer_model": "folder"}, "HuggingFaceTokenizer"),
        ({"vocab_file": "v.json", "merge_file": "m.txt"}, "GPT2BPETokenizer"),
        ({"vocab_file": "vocab.txt"}, "BertWordPieceLowerCase"),
        ({"vocab_file": "v.json", "true_vocab_size": 50257}, None),
    ],
)
def test_files_say_which_tokenizer_they_are_of(files: dict[str, Any], kind: str | None) -> None:
    config = from_dict(ReshardConfig, {"load_dir": "a", "save_dir": "b", **files})
    tokenizer = config.tokenizer()
    assert (tokenizer and tokenizer.tokenizer_type) == kind
