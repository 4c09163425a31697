"""Converts Megatron-LM's arguments of experts to our options, and back."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from trainyard.artifacts.strict_json import shown
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.moe_config import LoadBalancing

MAX_PATTERN = 8 * MAX_LAYERS
"""Most characters of an argument that lists layers, such as `window_attn_skip_freq`."""

OF_EXPERTS = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_score_function"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_grouped_gemm"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
    "moe_apply_probs_on_input",
)
"""Fields of MoEConfig that are arguments of the same name and meaning."""


def experts_of(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of experts, if the model has any."""
    if not args.get("num_experts"):
        return {}
    balancing = args.get("moe_router_load_balancing_type")
    if isinstance(balancing, list) and len(balancing) == 1:
        balancing = balancing[0]
    if balancing not in (None, *typing.get_args(LoadBalancing)):
        raise ConfigError(
            f"{where}: is a model with --moe-router-load-balancing-type {balancing!s:.40}, which "
            "this version of trainyard does not compute"
        )
    tp, etp = args.get("tensor_model_parallel_size"), args.get("expert_tensor_parallel_size")
    if etp not in (None, tp):
        raise ConfigError(
            f"{where}: its experts are cut over {etp!s:.40} ranks and the rest over {tp!s:.40}; "
            "this version reads only those with as many: convert it in Megatron-LM"
        )
    found = {name: args[name] for name in OF_EXPERTS if args.get(name) is not None}
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_topk_scaling_factor"):
        value = found.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = found[name] = value[0]
        if type(value) is int:
            found[name] = float(value)
    if balancing is not None:
        found["moe_router_load_balancing_type"] = balancing
    freq = args.get("moe_layer_freq")
    if freq is not None:
        if len(str(freq)) > MAX_PATTERN:
            raise ArtifactError(f"{where}: moe_layer_freq {shown(freq)} describes no layers")
        found["moe_layer_freq"] = str(freq).replace(" ", "")
    return found


def expert_args(config: TransformerConfig) -> dict[str, Any]:
    """The arguments of experts, `num_experts` None for a model without any."""
    moe = config.experts
    if moe.num_experts is None:
        return {"num_experts": None}
    freq = moe.moe_layer_freq
    return {
        **{name: getattr(moe, name) for name in OF_EXPERTS},
        "moe_ffn_hidden_size": config.expert_ffn_size,
        "moe_router_load_balancing_type": moe.moe_router_load_balancing_type,
        "moe_layer_freq": (
            int(freq) if freq.isdecimal() else [int(on) for on in moe.pattern(config.num_layers)]
        ),
    }
