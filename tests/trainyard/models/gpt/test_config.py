"""What a GPT configuration derives and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.models.costs.flops import flops_per_token
from trainyard.models.costs.memory_detail import detailed_memory
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.parallel_layout import ParallelLayout

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


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"disable_bias_linear": True}, "gelu"),
        ({"disable_bias_linear": True, "openai_gelu": True}, "gelu_tanh"),
        ({"swiglu": True}, "swiglu"),
        ({"quick_geglu": True}, "quick_geglu"),
        ({"squared_relu": True}, "squared_relu"),
        ({"quick_gelu": True}, "quick_gelu"),
    ],
)
def test_activation_is_upstreams(changes: dict[str, Any], activation: str) -> None:
    assert small(**changes).activation == activation


@pytest.mark.parametrize(
    ("frequency", "windows"),
    [
        (None, [True] * 6),
        ("3", [True, True, False] * 2),
        ("[1,1,0,0,1,0]", [True, True, False, False, True, False]),
        ("([1]*2+[0])*2", [True, True, False] * 2),
    ],
)
def test_windows_skip_layers(frequency: str | None, windows: list[bool]) -> None:
    config = small(num_layers=6, window_size="7,0", window_attn_skip_freq=frequency)
    expected = [(7, 0) if window else None for window in windows]
    assert [config.attention_window(layer) for layer in range(6)] == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window_size": "wide"}, "--window-size must be LEFT,RIGHT"),
        ({"window_size": "7,1"}, "decoder sees nothing to the right"),
        ({"window_attn_skip_freq": "2"}, "no effect without --window-size"),
        ({"window_size": "7,0", "window_attn_skip_freq": "[1]"}, "for each of --num-layers"),
        ({"window_size": "7,0", "window_attn_skip_freq": "f(1)"}, "must be a number or a list"),
        ({"window_size": "7,0", "window_attn_skip_freq": "0"}, "must be above 0"),
        ({"swiglu": True, "squared_relu": True}, "--swiglu and --squared-relu exclude"),
        ({"quick_geglu": True, "quick_gelu": True}, "--quick-geglu and --quick-gelu exclude"),
        ({"use_rope_scaling": True}, "needs --position-embedding-type rope"),
        (
            {"position_embedding_type": "yarn", "rotary_interleaved": True},
            "--rotary-interleaved has no meaning",
        ),
        ({"yarn_beta_fast": 0.5}, "--yarn-beta-fast"),
        ({"use_flash_attn": True, "attention_backend": "unfused"}, "--use-flash-attn contradicts"),
        ({"qk_l2_norm": True, "mla": LatentConfig(multi_latent_attention=True)}, "no --qk-l2-norm"),
        ({"recompute_num_layers": 1}, "need --recompute-granularity full"),
        (
            {"recompute_granularity": "full", "recompute_num_layers": 3},
            "--recompute-num-layers .3. must be from 1 to --num-layers .2.",
        ),
        (
            {"recompute_granularity": "full", "recompute_activations": True},
            "--recompute-activations implies",
        ),
        ({"recompute_modules": ()}, "--recompute-modules names no module"),
        ({"cpu_offloading_num_layers": 3}, "--cpu-offloading-num-layers .3. must be from 0"),
        (
            {"cpu_offloading_num_layers": 1, "recompute_granularity": "full"},
            "give one of them",
        ),
        ({"embedding_init_method_std": 0.0}, "--embedding-init-method-std"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        small(**changes)


def test_questions_are_answered_before_anything_is_built() -> None:
    config = small()
    assert flops_per_token(config, 128) == 6 * (
        2 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 32 * 64 + 64 * 128
    )
    assert detailed_memory(config, 128, ParallelLayout()).parameters == 2 * config.num_params(128)
