"""Trained parameters of the parts of a layer, biases included. Standard library only."""

from __future__ import annotations

from typing import Any


def attention_params(config: Any) -> int:
    """Of self-attention, without its norm."""
    h, qkv = config.hidden_size, config.query_size + 2 * config.kv_size
    weights = qkv * h + config.query_size * h
    biases = (qkv if config.qkv_bias else 0) + (h if config.linear_bias else 0)
    heads = 2 * config.norm_tensors * config.head_dim if config.qk_layernorm else 0
    sinks = config.num_attention_heads if config.softmax_type == "learnable" else 0
    return int(weights + biases + heads + sinks)


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
