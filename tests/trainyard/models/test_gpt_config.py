"""What a GPT configuration derives and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.models.config import GPTConfig
from trainyard.models.moe_config import MoEConfig

SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}


def small(**changes: Any) -> GPTConfig:
    return GPTConfig(**(SMALL | changes))


def test_megatron_defaults_are_derived() -> None:
    config = small()
    assert (config.ffn_size, config.head_dim, config.query_groups, config.positions) == (
        256,
        16,
        4,
        32,
    )
    assert config.linear_bias
    assert config.qkv_bias


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 10880), (1024, 2688), (64, 128)])
def test_swiglu_width_is_two_thirds_of_4h_in_steps_of_64(hidden: int, ffn: int) -> None:
    assert small(hidden_size=hidden, swiglu=True).ffn_size == ffn


def test_vocabulary_is_padded_to_the_divisor_times_tensor_parallel_size() -> None:
    config = small()
    assert config.padded_vocab_size(50257) == 50304
    assert config.padded_vocab_size(50257, tensor_parallel_size=8) == 51200
    assert config.padded_vocab_size(50304) == 50304


def test_qkv_bias_can_stay_alone() -> None:
    config = small(disable_bias_linear=True, add_qkv_bias=True)
    assert config.qkv_bias
    assert not config.linear_bias


def test_gpt2_345m_has_its_published_number_of_parameters() -> None:
    config = GPTConfig(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=1024)
    assert config.num_params(50304) == 354_871_296


def test_llama2_7b_has_its_published_number_of_parameters() -> None:
    config = GPTConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_hidden_size=11008,
        seq_length=4096,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
    )
    assert config.num_params(32000) == 6_738_415_616


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 0}, "--num-layers must be above 0, got 0"),
        ({"hidden_size": -64}, "--hidden-size must be above 0"),
        (
            {"hidden_size": 66},
            r"--hidden-size \(66\) must be divisible by --num-attention-heads \(4\)",
        ),
        ({"num_query_groups": 2}, "no effect without --group-query-attention"),
        (
            {"group_query_attention": True, "num_query_groups": 3},
            r"--num-attention-heads \(4\) must be divisible by --num-query-groups \(3\)",
        ),
        ({"max_position_embeddings": 16}, r"--max-position-embeddings \(16\) must be at least"),
        ({"hidden_dropout": 1.0}, "--hidden-dropout must be in"),
        ({"attention_dropout": -0.1}, "--attention-dropout must be in"),
        ({"rotary_percent": 1.5}, "--rotary-percent must be in"),
        (
            {"position_embedding_type": "rope", "rotary_percent": 0.2},
            "--rotary-percent 0.2 of a head of 16 channels gives 3",
        ),
        ({"init_method_std": 0.0}, "--init-method-std"),
        ({"ffn_hidden_size": 0}, "--ffn-hidden-size"),
        ({"norm_epsilon": float("nan")}, "--norm-epsilon"),
    ],
)
def test_what_cannot_be_built_is_refused_in_words(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        small(**changes)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_experts": 0}, "--num-experts"),
        ({"num_experts": 4, "moe_router_topk": 5}, "--moe-router-topk"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 0}, "--moe-ffn-hidden-size"),
    ],
)
def test_expert_counts_are_refused_in_words(values: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MoEConfig(**values)
