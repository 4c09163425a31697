"""Rules between the options of a `TransformerConfig`, which calls them; each function raises
ConfigError. Standard library only."""

from __future__ import annotations

from typing import Any

from trainyard.config import MAX_SIZE, check_above_zero, check_at_most, flag
from trainyard.errors import ConfigError

MAX_LAYERS = 4096
"""Each layer has a dozen tensors, and every checkpoint lists their names."""

MAX_PARAMS = 10**15
"""Limit for a whole model; the bytes of its checkpoint still fit in 64 bits."""


ACTIVATION_FLAGS = (
    *("swiglu", "quick_geglu", "squared_relu", "quick_gelu", "openai_gelu"),
    *("relu", "geglu"),
)
"""Options that exclude each other; a family may have some of them only."""


def check_sizes(config: Any) -> None:
    """Layers, widths and heads."""
    sizes = (
        *("hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
        *("seq_length", "make_vocab_size_divisible_by"),
    )
    check_above_zero(config, "num_layers", *sizes, "num_query_groups")
    check_at_most(config, MAX_LAYERS, "num_layers")
    check_at_most(config, MAX_SIZE, *sizes)
    heads, groups = config.num_attention_heads, config.num_query_groups
    if config.kv_channels is None and config.hidden_size % heads:
        raise ConfigError(
            f"--hidden-size ({config.hidden_size}) must be divisible by --num-attention-heads "
            f"({heads}); or give the width of a head with --kv-channels"
        )
    if not config.group_query_attention and groups != 1:
        raise ConfigError(
            f"--num-query-groups {groups} has no effect without --group-query-attention; "
            "add that flag or leave the number out"
        )
    if config.group_query_attention and heads % groups:
        raise ConfigError(
            f"--num-attention-heads ({heads}) must be divisible by --num-query-groups ({groups})"
        )


def check_numbers(config: Any) -> None:
    """Of norms, dropout and initial weights."""
    check_above_zero(config, "norm_epsilon", "init_method_std", "embedding_init_method_std")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ConfigError(f"{flag(name)} must be in [0, 1), got {getattr(config, name)}")


def check_positions(config: Any) -> None:
    """Lengths and rotation."""
    originals = ("rope_scaling_original_max_position_embeddings",)
    lengths = ("max_position_embeddings", *originals, "yarn_original_max_position_embeddings")
    factors = (
        *("rotary_base", "rotary_seq_len_interpolation_factor", "rope_scaling_factor"),
        *("yarn_rotary_scaling_factor", "yarn_beta_fast", "yarn_beta_slow"),
    )
    check_above_zero(config, *lengths, *factors)
    check_at_most(config, MAX_SIZE, *lengths)
    if not 0.0 < config.rotary_percent <= 1.0:
        raise ConfigError(f"--rotary-percent must be in (0, 1], got {config.rotary_percent}")
    if config.positions < config.seq_length:
        raise ConfigError(
            f"--max-position-embeddings ({config.positions}) must be at least --seq-length "
            f"({config.seq_length})"
        )
    if config.rotary and (config.rotary_dim % 2 or not config.rotary_dim):
        raise ConfigError(
            f"--rotary-percent {config.rotary_percent} of a head of {config.head_dim} channels "
            f"gives {config.rotary_dim} rotating channels; it must be an even number above 0"
        )
    kind = config.position_embedding_type
    if kind == "relative" and not config.RELATIVE_POSITIONS:
        raise ConfigError(
            "--position-embedding-type relative is for --model-type t5, and this is a "
            f"{config.model_type}; use rope or learned_absolute"
        )
    if config.use_rope_scaling and kind != "rope":
        raise ConfigError(
            f"--use-rope-scaling needs --position-embedding-type rope, which is {kind}; "
            "leave one of them out"
        )
    if kind == "yarn" and config.rotary_interleaved:
        raise ConfigError(
            "--rotary-interleaved has no meaning with --position-embedding-type yarn; leave it out"
        )
    if config.yarn_beta_fast < config.yarn_beta_slow:
        raise ConfigError(
            f"--yarn-beta-fast ({config.yarn_beta_fast}) must be at least --yarn-beta-slow "
            f"({config.yarn_beta_slow})"
        )


def check_attention(config: Any) -> None:
    """Windows, kernels and norms of heads."""
    if config.window_attn_skip_freq is not None and config.window_size is None:
        raise ConfigError(
            "--window-attn-skip-freq has no effect without --window-size; give both or none"
        )
    if config.use_flash_attn and config.attention_backend not in ("auto", "flash"):
        raise ConfigError(
            f"--use-flash-attn contradicts --attention-backend {config.attention_backend}; give "
            "one of them"
        )
    if config.qk_l2_norm and config.model_type != "gpt":
        raise ConfigError(
            f"--qk-l2-norm is for --model-type gpt, and this is a {config.model_type}; leave it out"
        )
    for layer in range(config.num_layers):
        config.attention_window(layer)


def check_activation(config: Any) -> None:
    """One function between the matrices of the MLP, and what bounds and moves its parts."""
    chosen = [flag(name) for name in ACTIVATION_FLAGS if getattr(config, name, False)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other; give one")
    check_above_zero(config, "activation_func_clamp_value")
    given = {
        "--activation-func-clamp-value": config.activation_func_clamp_value is not None,
        "--glu-linear-offset": config.glu_linear_offset != 0.0,
    }
    options = [option for option, is_given in given.items() if is_given]
    if options and not config.quick_geglu:
        raise ConfigError(
            f"{' and '.join(options)}: only --quick-geglu computes with it; give that too, or "
            "leave it out"
        )


def check_recompute(config: Any) -> None:
    """What the backward pass computes again or fetches from the host."""
    if config.recompute_activations and config.recompute_granularity == "full":
        raise ConfigError(
            "--recompute-activations implies --recompute-granularity selective, but full was "
            "given; give one of them"
        )
    if not config.recompute_modules:
        raise ConfigError("--recompute-modules names no module; leave it out for core_attn")
    layers, count = config.num_layers, config.recompute_num_layers
    if count is not None and not 0 < count <= layers:
        raise ConfigError(
            f"--recompute-num-layers ({count}) must be from 1 to --num-layers ({layers})"
        )
    if config.recompute != "full" and (count is not None or config.recompute_method is not None):
        raise ConfigError(
            "--recompute-method and --recompute-num-layers need --recompute-granularity full"
        )
    offloaded = config.cpu_offloading_num_layers
    if not 0 <= offloaded <= layers:
        raise ConfigError(
            f"--cpu-offloading-num-layers ({offloaded}) must be from 0 to --num-layers ({layers})"
        )
    if offloaded and config.recompute != "none":
        raise ConfigError(
            f"--cpu-offloading-num-layers moves what --recompute-granularity {config.recompute} "
            "does not keep; give one of them"
        )


CHECKS = (
    *(check_sizes, check_numbers, check_positions),
    *(check_attention, check_activation, check_recompute),
)
"""Those of every model, in this order."""


def check_params(config: Any, padded_vocab_size: int) -> None:
    """The bytes of the model fit in 64 bits."""
    count = config.num_params(padded_vocab_size)
    if count > MAX_PARAMS:
        experts = config.experts.num_experts
        raise ConfigError(
            f"the model has {count:.1e} parameters, the limit is {MAX_PARAMS:.0e}; reduce "
            f"one of: --num-layers {config.num_layers}, --hidden-size "
            f"{config.hidden_size}, --ffn-hidden-size {config.ffn_size}, --num-attention-heads "
            f"{config.num_attention_heads} of --kv-channels {config.head_dim}, "
            f"--max-position-embeddings {config.positions}, "
            + ("" if experts is None else f"--num-experts {experts}, ")
            + f"{padded_vocab_size} rows of the embedding"
        )
