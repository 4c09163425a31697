"""Trained parameters of the parts of a layer, biases included. Standard library only."""

from __future__ import annotations

from typing import Any


def attention_params(config: Any) -> int:
    """Of self-attention, without its norm."""
    cut, whole = attention_matrices(config)
    has_qkv_bias = config.qkv_bias and not config.latent.enabled
    biases = config.query_size + 2 * config.kv_size if has_qkv_bias else 0
    biases += config.hidden_size if config.linear_bias else 0
    sinks = config.num_attention_heads if config.softmax_type == "learnable" else 0
    return int(cut + whole + biases + _inner_norm_params(config) + sinks)


def attention_matrices(config: Any) -> tuple[int, int]:
    """Weights of the matrices of self-attention: (those that tensor-parallel ranks share, those
    that are whole on every rank)."""
    h, latent = config.hidden_size, config.latent
    if not latent.enabled:
        return h * (config.query_size + 2 * config.kv_size) + config.query_size * h, 0
    heads, r = config.num_attention_heads, latent.kv_lora_rank
    queries = (latent.q_lora_rank or h) * config.query_size
    keys_and_values = r * heads * (latent.qk_head_dim + latent.v_head_dim)
    to_latents = h * ((latent.q_lora_rank or 0) + r + latent.qk_pos_emb_head_dim)
    return queries + keys_and_values + config.context_size * h, to_latents


def whole_attention_params(config: Any) -> int:
    """Of self-attention, on every tensor-parallel rank, without its norm and biases."""
    return attention_matrices(config)[1] + _inner_norm_params(config)


def _inner_norm_params(config: Any) -> int:
    """Of the norms of query and key heads, or of latents."""
    if config.qk_l2_norm or not config.qk_layernorm:
        return 0
    latent = config.latent
    width = (latent.q_lora_rank or 0) + latent.kv_lora_rank
    return int(config.norm_tensors * (width if latent.enabled else 2 * config.head_dim))


def mlp_params(config: Any, width: int) -> int:
    """Of an MLP of this width inside."""
    h, fc1 = config.hidden_size, width * (2 if config.gated else 1)
    biases = h + fc1 if config.linear_bias else 0
    return int(fc1 * h + width * h + biases)


def router_params(config: Any) -> int:
    """Of the router of a mixture of experts."""
    bias = 1 if config.linear_bias else 0
    return int((config.experts.num_experts or 0) * (config.hidden_size + bias))


def shared_expert_params(config: Any) -> int:
    """Of the expert that every token visits, with its gate; 0 without one."""
    moe = config.experts
    if moe.moe_shared_expert_intermediate_size is None:
        return 0
    gate = config.hidden_size if moe.moe_shared_expert_gate else 0
    return mlp_params(config, moe.moe_shared_expert_intermediate_size) + int(gate)


def mixture_params(config: Any) -> int:
    """Of a mixture of experts."""
    routed = (config.experts.num_experts or 0) * mlp_params(config, config.expert_ffn_size)
    return router_params(config) + shared_expert_params(config) + routed
