"""The plan of a command of Megatron-LM: bytes by number format, and tokens of a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.plan.run import plan
from stages.plan.vocabulary import count_tokens
from tests.stages.directly import run_program
from tests.stages.test_plan import configure
from trainyard.config import from_dict
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.costs.memory import count_parameters
from trainyard.models.parallel_layout import MAIN_BYTES, MOMENT_BYTES, ONE_MOMENT_BYTES
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

AWARE = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16"}
ROWS = [
    ({}, 18, 6, 12),
    ({"bf16": True}, 18, 6, 12),
    ({"fp16": True}, 20, 4, 16),
    ({"fp32": True}, 16, 8, 8),
    ({"fp8_format": "hybrid"}, 18, 6, 12),
    ({"fp8_format": "e4m3", "fp8_param_gather": True}, 18, 6, 12),
    (AWARE, 14, 4, 10),
    ({**AWARE, "exp_avg_sq_dtype": "bf16"}, 12, 4, 8),
    ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, 12, 6, 6),
    ({"optimizer": "lion"}, 14, 6, 8),
    ({"optimizer": "sgd"}, 14, 6, 8),
    ({"optimizer": "muon", "muon_scalar_optimizer": "lion"}, 14, 6, 8),
]
"""Bytes of a parameter; with the distributed optimizer these plus those over the replicas: the
table of Megatron-LM's documentation, FP8, whose weights stay in bf16, and moments in bf16."""


@pytest.mark.parametrize(("options", "alone", "whole", "shared"), ROWS)
def test_bytes_of_a_parameter_follow_its_format(
    options: dict[str, Any], alone: int, whole: int, shared: int
) -> None:
    def bytes_each(**more: Any) -> float:
        memory = plan(configure(**options, **more))
        total = memory["memory_bytes"]["total"] - memory["memory_bytes"]["activations"]
        each: float = total / memory["parameters"]["most_loaded_shard"]
        return each

    assert bytes_each() == pytest.approx(alone)
    sharded = {"use_distributed_optimizer": True, "world_size": 8, "global_batch_size": 64}
    assert bytes_each(**sharded) == pytest.approx(whole + shared / 8)


def test_only_what_trainyard_has_is_counted_tensor_by_tensor() -> None:
    assert plan(configure(fp32=True))["memory_detail_bytes"] is not None
    assert plan(configure(fp8_format="hybrid"))["memory_detail_bytes"] is None


def test_formats_of_gradients_and_moments_count_tensor_by_tensor() -> None:
    whole = plan(configure(bf16=True, world_size=2))["memory_detail_bytes"]
    aware = plan(configure(**AWARE, bf16=True, world_size=2))["memory_detail_bytes"]
    assert aware["parameters"] == whole["parameters"]
    assert aware["gradients"] == whole["gradients"] / 2
    assert aware["optimizer"] == pytest.approx(whole["optimizer"] * 10 / 12)
    offloaded = plan(configure(bf16=True, world_size=2, optimizer_cpu_offload=True))
    found = offloaded["memory_detail_bytes"]
    assert (found["optimizer"], found["gradients"]) == (0, whole["gradients"])
    fp16 = plan(configure(fp16=True, world_size=2, grad_reduce_in_fp16=True))
    assert fp16["memory_detail_bytes"]["gradients"] == whole["gradients"] / 2
    sole = plan(configure(bf16=True))["memory_detail_bytes"]  # nothing is added up
    assert sole["gradients"] == whole["gradients"] / 2
    wide = plan(configure(bf16=True, accumulate_allreduce_grads_in_fp32=True))
    assert wide["memory_detail_bytes"]["gradients"] == whole["gradients"]
    with pytest.raises(ConfigError, match="--exp-avg-dtype bf16 needs --use-precision-aware"):
        configure(exp_avg_dtype="bf16")


def test_muon_has_one_moment_of_the_layers_and_two_of_the_tables() -> None:
    config = configure(optimizer="muon")
    counted = count_parameters(config.model, config.rows, config.layout())
    tables, layers = counted.embedding, counted.transformer_block
    wanted = MAIN_BYTES * (tables + layers) + MOMENT_BYTES * tables + ONE_MOMENT_BYTES * layers
    assert plan(config)["memory_bytes"]["optimizer"] == pytest.approx(wanted)


MEGATRONS = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048"
MEGATRONS += " --micro-batch-size 4"


def test_without_a_vocabulary_gpt2s_is_counted_and_said() -> None:
    done = run_program("stages.plan", *MEGATRONS.split(), expect=0)
    assert "weight and optimizer=6069.97 MB" in done.out
    assert (
        "neither --vocab-size nor a tokenizer is given: counting GPT-2's 50257 tokens" in done.err
    )
    rows = run_program("stages.plan", *MEGATRONS.split(), "--padded-vocab-size", "50304", expect=0)
    assert rows.out == done.out


def test_options_of_a_training_and_its_yaml_file_are_read(tmp_path: Path) -> None:
    words = f"{MEGATRONS} --vocab-size 50257 --lr 3 --train-iters 9 --use-mcore-models --profile"
    done = run_program("stages.plan", *words.split(), expect=0)
    assert "--lr, --train-iters, --use-mcore-models, --profile: ignored: a plan does" in done.err
    keys = [word.replace("-", "_").removeprefix("__") for word in words.split()[:-2]]
    text = "\n".join(f"{key}: {value}" for key, value in zip(keys[::2], keys[1::2], strict=True))
    (tmp_path / "run.yaml").write_text(text)
    read = run_program("stages.plan", "--yaml-cfg", str(tmp_path / "run.yaml"), expect=0)
    assert read.out == done.out


@pytest.mark.slow
def test_tokens_are_counted_as_the_tokenizers_count_them(tmp_path: Path, shared: Path) -> None:
    vocab = shared / "data/vocab"
    bert = {"vocab_file": str(vocab / "bert/bert-base-cased-vocab.txt")}
    for options in (
        {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(vocab / "gpt2/vocab.json"),
            "merge_file": str(vocab / "gpt2/merges.txt"),
        },
        {"tokenizer_type": "BertWordPieceLowerCase", **bert},
        {"tokenizer_type": "BertWordPieceCase", **bert},
        {"tokenizer_type": "BertWordPieceCase", "vocab_extra_ids": 0, **bert},
        {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(vocab / "hf/gpt-neox-tokenizer.json"),
        },
    ):
        config = from_dict(TokenizerConfig, options)
        assert count_tokens(config) == build_tokenizer(config).vocab_size, options
    llama = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "t.model"}
    with pytest.raises(ConfigError, match=r"Llama2Tokenizer: .*; give --vocab-size"):
        count_tokens(from_dict(TokenizerConfig, llama))
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ArtifactError, match=r"vocab\.json: not a JSON object"):
        count_tokens(from_dict(TokenizerConfig, {**GPT2, "vocab_file": f"{tmp_path}/vocab.json"}))


GPT2 = {"tokenizer_type": "GPT2BPETokenizer", "merge_file": "m"}
