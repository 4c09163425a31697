"""Finds the class of `transformers` that computes what our GPT does, and writes its config.json.

    rotary, RMSNorm, SwiGLU, no linear biases   LlamaForCausalLM (tied or not, grouped queries)
      and a window on every layer               MistralForCausalLM
      and QKV biases                            Qwen2ForCausalLM
      and normalised queries and keys           Qwen3ForCausalLM
    learned positions, LayerNorm, GELU, biases  GPT2LMHeadModel (tied)

Rotary embedding may be scaled linearly, as in Llama 3.1, or by YaRN. Any other model raises a
ConfigError that names the options that no class has."""

from __future__ import annotations

from typing import Any

from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.rope import LLAMA3_HIGH_FREQUENCY, LLAMA3_LOW_FREQUENCY, yarn_gain

LLAMA = "LlamaForCausalLM"
MISTRAL = "MistralForCausalLM"
QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
GPT2 = "GPT2LMHeadModel"

GPT2_ACTIVATIONS = {
    **{"gelu_tanh": "gelu_new", "gelu": "gelu"},
    **{"quick_gelu": "quick_gelu", "squared_relu": "relu2"},
}


# --- which architecture fits ------------------------------------------------------------------


def _llama_misfits(config: GPTConfig) -> list[str]:
    return [*_rotary_misfits(config), *_extras(config, qkv_bias=False, qk_norm=False)]


def _mistral_misfits(config: GPTConfig) -> list[str]:
    found = [*_rotary_misfits(config), *_extras(config, window=True, qkv_bias=False, qk_norm=False)]
    if len({config.attention_window(layer) for layer in range(config.num_layers)}) > 1:
        found.append("--window-attn-skip-freq")
    return found


def _qwen2_misfits(config: GPTConfig) -> list[str]:
    return [*_rotary_misfits(config), *_extras(config, qkv_bias=True, qk_norm=False)]


def _qwen3_misfits(config: GPTConfig) -> list[str]:
    return [*_rotary_misfits(config), *_extras(config, qkv_bias=False, qk_norm=True)]


def _rotary_misfits(config: GPTConfig) -> list[str]:
    """Options that no class like Llama's computes."""
    scaled = config.use_rope_scaling or config.position_embedding_type == "yarn"
    factor = config.rotary_seq_len_interpolation_factor
    rules = {
        f"--position-embedding-type {config.position_embedding_type} (must be rope or yarn)": (
            not config.rotary
        ),
        f"--rotary-percent {config.rotary_percent} (must be 1.0)": config.rotary_percent != 1.0,
        "--rotary-interleaved": config.rotary_interleaved,
        f"--rotary-seq-len-interpolation-factor {factor} beside another scaling": (
            scaled and factor is not None
        ),
        f"--normalization {config.normalization} (must be RMSNorm)": (
            config.normalization != "RMSNorm"
        ),
        "no --swiglu": not config.swiglu,
        "no --disable-bias-linear": config.linear_bias,
        **_unknown_to_all(config),
    }
    return [text for text, broken in rules.items() if broken]


def _extras(config: GPTConfig, *, qkv_bias: bool, qk_norm: bool, window: bool = False) -> list[str]:
    rules = {
        _wanted("--add-qkv-bias", qkv_bias): config.add_qkv_bias != qkv_bias,
        _wanted("--qk-layernorm", qk_norm): config.qk_layernorm != qk_norm,
        _wanted("--window-size", window): (config.window_size is not None) != window,
    }
    return [text for text, broken in rules.items() if broken]


def _wanted(option: str, wanted: bool) -> str:
    return f"no {option}" if wanted else option


def _unknown_to_all(config: GPTConfig) -> dict[str, bool]:
    return {
        "--apply-layernorm-1p": config.apply_layernorm_1p,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
    }


def _gpt2_misfits(config: GPTConfig) -> list[str]:
    rules = {
        f"--position-embedding-type {config.position_embedding_type} (must be learned_absolute)": (
            config.position_embedding_type != "learned_absolute"
        ),
        f"--normalization {config.normalization} (must be LayerNorm)": (
            config.normalization != "LayerNorm"
        ),
        "--swiglu": config.swiglu,
        "--quick-geglu": config.quick_geglu,
        "--disable-bias-linear": config.disable_bias_linear,
        "--qk-layernorm": config.qk_layernorm,
        "--window-size": config.window_size is not None,
        "--group-query-attention": config.query_groups != config.num_attention_heads,
        f"--kv-channels {config.kv_channels} (must be hidden size / attention heads)": (
            config.query_size != config.hidden_size
        ),
        "--untie-embeddings-and-output-weights": config.untie_embeddings_and_output_weights,
        **_unknown_to_all(config),
    }
    return [text for text, broken in rules.items() if broken]


MISFITS = {
    LLAMA: _llama_misfits,
    MISTRAL: _mistral_misfits,
    QWEN2: _qwen2_misfits,
    QWEN3: _qwen3_misfits,
    GPT2: _gpt2_misfits,
}


def architecture(config: GPTConfig) -> str:
    """The class of `transformers` that computes the same; ConfigError says why none does."""
    misfits = {name: found(config) for name, found in MISFITS.items()}
    for name, broken in misfits.items():
        if not broken:
            return name
    reasons = "; ".join(f"{name}: {', '.join(broken)}" for name, broken in misfits.items())
    raise ConfigError(
        "--saver hf: no Hugging Face architecture fits this model. Options that each cannot have: "
        f"{reasons}. Keep the checkpoint in our format (--saver trainyard)"
    )


# --- config.json ------------------------------------------------------------------------------


def model_document(config: GPTConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """The config.json of `transformers`, without the tokenizer's special ids."""
    name = architecture(config)
    common = {
        "architectures": [name],
        "dtype": dtype,
        "torch_dtype": dtype,  # read by transformers before 4.56
        "vocab_size": vocab_size,
        "initializer_range": config.init_method_std,
        "use_cache": True,
    }
    if name == GPT2:
        return common | _gpt2_document(config)
    return common | _llama_document(config) | _own_fields(config, name)


def _llama_document(config: GPTConfig) -> dict[str, Any]:
    rope = _rope_parameters(config)
    document = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,  # read by transformers before 5
        "rope_parameters": rope,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }
    if rope["rope_type"] != "default":  # read by transformers before 5
        document["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return document


def _own_fields(config: GPTConfig, name: str) -> dict[str, Any]:
    """The fields of each class that are not common to all."""
    window = config.attention_window(0)
    fields: dict[str, dict[str, Any]] = {
        LLAMA: {"model_type": "llama", "attention_bias": False, "mlp_bias": False},
        MISTRAL: {"model_type": "mistral", "sliding_window": _tokens_seen(window)},
        QWEN2: {"model_type": "qwen2", "use_sliding_window": False},
        QWEN3: {"model_type": "qwen3", "attention_bias": False, "use_sliding_window": False},
    }
    return fields[name]


def _tokens_seen(window: tuple[int, int] | None) -> int | None:
    """`sliding_window`, which counts the token itself; None: no window."""
    return None if window is None or window[0] < 0 else window[0] + 1


def _rope_parameters(config: GPTConfig) -> dict[str, Any]:
    theta = {"rope_theta": config.rotary_base}
    if config.use_rope_scaling:
        return theta | {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": LLAMA3_LOW_FREQUENCY,
            "high_freq_factor": LLAMA3_HIGH_FREQUENCY,
            "original_max_position_embeddings": (
                config.rope_scaling_original_max_position_embeddings
            ),
        }
    if config.position_embedding_type == "yarn":
        return theta | {
            "rope_type": "yarn",
            "factor": config.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "attention_factor": yarn_gain(config),
            "truncate": config.yarn_correction_range_round_to_int,
        }
    factor = config.rotary_seq_len_interpolation_factor
    if factor is not None:
        return theta | {"rope_type": "linear", "factor": factor}
    return theta | {"rope_type": "default"}


def _gpt2_document(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_positions": config.positions,
        "activation_function": GPT2_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": True,
    }
