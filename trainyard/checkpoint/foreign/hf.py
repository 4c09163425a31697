"""Our GPT as a Hugging Face folder that `transformers` loads without remote code.

    rotary, RMSNorm, SwiGLU, no linear biases   LlamaForCausalLM (tied or not, grouped queries)
    learned positions, LayerNorm, GELU, biases  GPT2LMHeadModel (tied)

Anything else is refused in the words of the options that do not fit. Weights are moved and turned,
never computed with: what comes out holds the same numbers. The padded rows of the vocabulary stay.

n query heads, g key and value heads, d head channels, h hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.models.config import GPTConfig

LLAMA = "LlamaForCausalLM"
GPT2 = "GPT2LMHeadModel"


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the other format and how it follows from one of ours."""

    name: str
    source: str
    """Name of our parameter."""
    convert: Callable[[Tensor], Tensor]


# --- which architecture fits ------------------------------------------------------------------


def _llama_misfits(config: GPTConfig) -> list[str]:
    rules = {
        f"--position-embedding-type {config.position_embedding_type} (must be rope)": (
            config.position_embedding_type != "rope"
        ),
        f"--rotary-percent {config.rotary_percent} (must be 1.0)": config.rotary_percent != 1.0,
        f"--normalization {config.normalization} (must be RMSNorm)": (
            config.normalization != "RMSNorm"
        ),
        "no --swiglu": not config.swiglu,
        "no --disable-bias-linear": config.linear_bias,
        "--add-qkv-bias": config.linear_bias is False and config.add_qkv_bias,
    }
    return [text for text, broken in rules.items() if broken]


def _gpt2_misfits(config: GPTConfig) -> list[str]:
    rules = {
        f"--position-embedding-type {config.position_embedding_type} (must be learned_absolute)": (
            config.position_embedding_type != "learned_absolute"
        ),
        f"--normalization {config.normalization} (must be LayerNorm)": (
            config.normalization != "LayerNorm"
        ),
        "--swiglu": config.swiglu,
        "--disable-bias-linear": config.disable_bias_linear,
        "--group-query-attention": config.query_groups != config.num_attention_heads,
        f"--kv-channels {config.kv_channels} (must be hidden size / attention heads)": (
            config.query_size != config.hidden_size
        ),
        "--untie-embeddings-and-output-weights": config.untie_embeddings_and_output_weights,
    }
    return [text for text, broken in rules.items() if broken]


def architecture(config: GPTConfig) -> str:
    """The class of `transformers` that computes the same; ConfigError says why none does."""
    misfits = {LLAMA: _llama_misfits(config), GPT2: _gpt2_misfits(config)}
    for name, broken in misfits.items():
        if not broken:
            return name
    reasons = "; ".join(f"{name}: {', '.join(broken)}" for name, broken in misfits.items())
    raise ConfigError(
        f"--saver hf: no Hugging Face architecture fits this model. What stands in the way of "
        f"{reasons}. Keep the checkpoint in our format (--saver trainyard)"
    )


# --- weights ----------------------------------------------------------------------------------


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()  # Conv1D of GPT-2 keeps (in, out)


def _rows(tensor: Tensor, part: int, parts: int) -> Tensor:
    return tensor.chunk(parts, dim=0)[part]


def split_qkv(tensor: Tensor, config: GPTConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (n d, ...), keys (g d, ...), values (g d, ...) of a tensor grouped by query group."""
    g, d = config.query_groups, config.head_dim
    per_group = config.num_attention_heads // g
    rest = tensor.shape[1:]
    grouped = tensor.view(g, per_group + 2, d, *rest)
    q, k, v = torch.split(grouped, [per_group, 1, 1], dim=1)
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def _llama_targets(config: GPTConfig) -> list[Target]:
    targets = [
        Target("model.embed_tokens.weight", "embedding.word_embeddings.weight", _as_is),
        Target("model.norm.weight", "decoder.final_layernorm.weight", _as_is),
    ]
    if config.untie_embeddings_and_output_weights:
        targets.append(Target("lm_head.weight", "output_layer.weight", _as_is))
    for layer in range(config.num_layers):
        targets += _llama_layer(config, f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    return targets


def _llama_layer(config: GPTConfig, theirs: str, ours: str) -> list[Target]:
    def qkv(part: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: split_qkv(tensor, config)[part]

    linear_qkv = f"{ours}self_attention.linear_qkv.weight"
    fc1 = f"{ours}mlp.linear_fc1.weight"
    norm, after = "input_layernorm.weight", "post_attention_layernorm.weight"
    return [
        Target(f"{theirs}{norm}", f"{ours}{norm}", _as_is),
        Target(f"{theirs}self_attn.q_proj.weight", linear_qkv, qkv(0)),
        Target(f"{theirs}self_attn.k_proj.weight", linear_qkv, qkv(1)),
        Target(f"{theirs}self_attn.v_proj.weight", linear_qkv, qkv(2)),
        Target(
            f"{theirs}self_attn.o_proj.weight", f"{ours}self_attention.linear_proj.weight", _as_is
        ),
        Target(f"{theirs}{after}", f"{ours}pre_mlp_layernorm.weight", _as_is),
        Target(f"{theirs}mlp.gate_proj.weight", fc1, lambda tensor: _rows(tensor, 0, 2)),
        Target(f"{theirs}mlp.up_proj.weight", fc1, lambda tensor: _rows(tensor, 1, 2)),
        Target(f"{theirs}mlp.down_proj.weight", f"{ours}mlp.linear_fc2.weight", _as_is),
    ]


def _gpt2_targets(config: GPTConfig) -> list[Target]:
    targets = [
        Target("transformer.wte.weight", "embedding.word_embeddings.weight", _as_is),
        Target("transformer.wpe.weight", "embedding.position_embeddings.weight", _as_is),
        *_gpt2_pair("transformer.ln_f", "decoder.final_layernorm", _as_is),
    ]
    for layer in range(config.num_layers):
        targets += _gpt2_layer(config, f"transformer.h.{layer}.", f"decoder.layers.{layer}.")
    return targets


def _gpt2_pair(theirs: str, ours: str, weight: Callable[[Tensor], Tensor]) -> list[Target]:
    return [
        Target(f"{theirs}.weight", f"{ours}.weight", weight),
        Target(f"{theirs}.bias", f"{ours}.bias", _as_is),
    ]


def _gpt2_layer(config: GPTConfig, theirs: str, ours: str) -> list[Target]:
    def packed(tensor: Tensor) -> Tensor:
        return torch.cat(split_qkv(tensor, config))

    c_attn, linear_qkv = f"{theirs}attn.c_attn", f"{ours}self_attention.linear_qkv"
    return [
        *_gpt2_pair(f"{theirs}ln_1", f"{ours}input_layernorm", _as_is),
        Target(f"{c_attn}.weight", f"{linear_qkv}.weight", lambda t: _transposed(packed(t))),
        Target(f"{c_attn}.bias", f"{linear_qkv}.bias", packed),
        *_gpt2_pair(f"{theirs}attn.c_proj", f"{ours}self_attention.linear_proj", _transposed),
        *_gpt2_pair(f"{theirs}ln_2", f"{ours}pre_mlp_layernorm", _as_is),
        *_gpt2_pair(f"{theirs}mlp.c_fc", f"{ours}mlp.linear_fc1", _transposed),
        *_gpt2_pair(f"{theirs}mlp.c_proj", f"{ours}mlp.linear_fc2", _transposed),
    ]


def targets(config: GPTConfig) -> list[Target]:
    """Every tensor of the Hugging Face model."""
    return _llama_targets(config) if architecture(config) == LLAMA else _gpt2_targets(config)


# --- config.json ------------------------------------------------------------------------------


def model_document(config: GPTConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """The config.json of `transformers`, without what the tokenizer decides."""
    name = architecture(config)
    common = {
        "architectures": [name],
        "dtype": dtype,
        "torch_dtype": dtype,  # read by transformers before 4.56
        "vocab_size": vocab_size,
        "initializer_range": config.init_method_std,
        "use_cache": True,
    }
    return common | (_llama_document(config) if name == LLAMA else _gpt2_document(config))


def _llama_document(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
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
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def _gpt2_document(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_positions": config.positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": True,
    }
