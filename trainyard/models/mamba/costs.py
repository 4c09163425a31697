"""What a layer of each kind costs in parameters and in memory. Standard library only.

Between its projections Mamba-2 keeps what the convolution and the scan give; with --mamba-backend
torch nothing, as the backward pass computes them again."""

from __future__ import annotations

from typing import Any

from trainyard.models.costs.memory_detail import MLP_TENSORS
from trainyard.models.layer_costs import LayerCosts
from trainyard.models.mamba.pattern import ATTENTION, EXPERTS, MAMBA
from trainyard.models.param_counts import mlp_params, router_params, shared_expert_params


def layer_costs(config: Any, letter: str) -> LayerCosts:
    """Of a layer of this kind. config: a MambaConfig."""
    norm, keeps_norm = config.norm_params(), not config.recomputes("layernorm")
    if letter == MAMBA:
        return _of_mamba(config, norm, keeps_norm)
    inside = config.kind_params(letter) - norm
    bias = config.hidden_size if config.linear_bias else 0  # of the matrix cut by columns
    if letter == ATTENTION:
        of_heads = 2 * config.norm_tensors * config.head_dim if config.qk_layernorm else 0
        keys = config.query_size + config.kv_size
        softmax = 0 if config.recomputes("core_attn") else config.num_attention_heads
        return LayerCosts(
            split=inside - bias - of_heads,
            whole=norm + bias + of_heads,
            kept=(3 if config.qk_layernorm else 2) * keys,
            kept_fp32=softmax,
            keeps_norm=keeps_norm,
        )
    again = config.recomputes("mlp")
    if letter == EXPERTS:
        return _of_experts(config, norm, keeps_norm and not again)
    return LayerCosts(
        split=inside - bias,
        whole=norm + bias,
        kept=0 if again else MLP_TENSORS[config.activation] * config.ffn_size,
        keeps_norm=keeps_norm and not again,
    )


def _of_mamba(config: Any, norm: int, keeps_norm: bool) -> LayerCosts:
    kept = sum(config.projected_sizes) + config.inner_size  # read by the last projection
    if config.mamba_backend != "torch":
        kept += sum(config.convolved_sizes) + config.inner_size
    return LayerCosts(split=config.mixer_params(), whole=norm, kept=kept, keeps_norm=keeps_norm)


def _of_experts(config: Any, norm: int, keeps_norm: bool) -> LayerCosts:
    moe, h = config.experts, config.hidden_size
    expert, tensors = mlp_params(config, config.expert_ffn_size), MLP_TENSORS[config.activation]
    rows = moe.moe_router_topk * (3 * h + tensors * config.expert_ffn_size)
    shared = tensors * (moe.moe_shared_expert_intermediate_size or 0)
    return LayerCosts(
        split=shared_expert_params(config),
        whole=norm + router_params(config),
        routed=(moe.num_experts or 0) * expert,
        visited=moe.moe_router_topk * expert,
        kept=rows + shared if keeps_norm else 0,
        kept_fp32=2 * (moe.num_experts or 0),
        keeps_norm=keeps_norm,
    )
