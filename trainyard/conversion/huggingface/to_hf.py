"""Our GPT's weights as those of the Hugging Face class that computes the same (hf_config.py).

Weights are moved and turned, never computed with: what comes out holds the same numbers. The padded
rows of the vocabulary stay.

n query heads, g key and value heads, d head channels, h hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.conversion.huggingface.config import GPT2, architecture
from trainyard.models.gpt.config import GPTConfig


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the other format and how it follows from one of ours."""

    name: str
    source: str
    """Name of our parameter."""
    convert: Callable[[Tensor], Tensor]


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
        *_qwen_extras(config, theirs, ours),
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


def _qwen_extras(config: GPTConfig, theirs: str, ours: str) -> list[Target]:
    """QKV biases of Qwen2, norms of queries and keys of Qwen3."""

    def rows(part: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: split_qkv(tensor, config)[part]

    extras = []
    if config.qkv_bias:
        bias = f"{ours}self_attention.linear_qkv.bias"
        extras += [
            Target(f"{theirs}self_attn.{name}_proj.bias", bias, rows(part))
            for part, name in enumerate("qkv")
        ]
    if config.qk_layernorm:
        extras += [
            Target(
                f"{theirs}self_attn.{name}_norm.weight",
                f"{ours}self_attention.{name}_layernorm.weight",
                _as_is,
            )
            for name in "qk"
        ]
    return extras


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


def targets(config: GPTConfig, name: str | None = None) -> list[Target]:
    """Every tensor of the Hugging Face model, in its order; of one tensor of ours, in the order of
    its parts. name: its class, where it is known; the one that fits."""
    found = architecture(config) if name is None else name
    return _gpt2_targets(config) if found == GPT2 else _llama_targets(config)
