"""DeepSeek-V2 and V3 in `transformers`: what our models need to be theirs, and their config.json.

Both have multi-latent attention with norms of the latents, the first layers dense, and experts with
shared ones in the others. V3 scores experts by a sigmoid, chooses them with a bias and within
groups; V2 by a softmax over all. The norms of the latents have an epsilon of 1e-6 there, whatever
the configuration says."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from trainyard.checkpoint.bounds import check_layers
from trainyard.conversion.fields import Fields
from trainyard.conversion.huggingface.misfits import rotary_misfits
from trainyard.conversion.huggingface.rope import read_rope, rope_parameters
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.mtp_config import MTPConfig

DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
DEEPSEEKS = (DEEPSEEK_V2, DEEPSEEK_V3)

EPSILON = 1e-6
"""Of the norms of latents."""

SUMMED = 2
"""Experts of a group whose scores V3 adds up to that of the group."""

OF_EXPERTS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("routed_scaling_factor", "scoring_func", "topk_method", "norm_topk_prob", "n_group"),
    *("topk_group", "aux_loss_alpha", "seq_aux", "moe_layer_freq"),
)
"""Fields that mean nothing where all layers are dense."""

HARMLESS = ("auto_map", "ep_size", "num_key_value_heads", "head_dim", "qk_head_dim")
"""Fields that follow from others or do not change the logits."""


# --- what fits --------------------------------------------------------------------------------


def deepseek_v3_misfits(config: TransformerConfig) -> list[str]:
    """Of DeepseekV3ForCausalLM."""
    moe = config.experts
    found = _common_misfits(config)
    if not moe.enabled:
        return found
    chosen = moe.moe_router_group_topk
    rules = {
        f"--moe-router-score-function {moe.moe_router_score_function}": (
            moe.moe_router_score_function != "sigmoid"
        ),
        "no --moe-router-enable-expert-bias": not moe.moe_router_enable_expert_bias,
        f"--moe-router-topk {moe.moe_router_topk} of --moe-router-group-topk {chosen} (must be "
        f"{SUMMED} of each group)": (
            chosen is not None and moe.moe_router_topk // chosen != SUMMED
        ),
    }
    return [*found, *(text for text, broken in rules.items() if broken)]


def deepseek_v2_misfits(config: TransformerConfig) -> list[str]:
    """Of DeepseekV2ForCausalLM."""
    moe = config.experts
    rules = {
        "no --num-experts": not moe.enabled,
        f"--moe-router-score-function {moe.moe_router_score_function}": (
            moe.moe_router_score_function != "softmax"
        ),
        "no --moe-router-pre-softmax": not moe.moe_router_pre_softmax,
        "--moe-router-num-groups": moe.moe_router_num_groups is not None,
    }
    return [*_common_misfits(config), *(text for text, broken in rules.items() if broken)]


def _common_misfits(config: TransformerConfig) -> list[str]:
    moe = config.experts
    rules = {
        "no --qk-layernorm": not config.qk_layernorm,
        f"--norm-epsilon {config.norm_epsilon} (must be {EPSILON})": config.norm_epsilon != EPSILON,
        "--window-size": config.window_size is not None,
    }
    if moe.enabled:
        width = moe.moe_shared_expert_intermediate_size
        rules |= {
            f"--moe-layer-freq {moe.moe_layer_freq} (dense layers must come first)": (
                _dense_layers(config) is None
            ),
            "--moe-expert-capacity-factor": moe.moe_expert_capacity_factor is not None,
            "--moe-shared-expert-gate": moe.moe_shared_expert_gate,
            f"--moe-shared-expert-intermediate-size {width} (must be a multiple of the width of an "
            "expert)": not width or width % config.expert_ffn_size != 0,
        }
    return [*rotary_misfits(config), *(text for text, broken in rules.items() if broken)]


def _dense_layers(config: TransformerConfig) -> int | None:
    """How many layers come before those with experts; None if others are dense too."""
    pattern = config.experts.pattern(config.num_layers)
    dense = pattern.count(False)
    return dense if not any(pattern[:dense]) else None


# --- ours to theirs ---------------------------------------------------------------------------


def deepseek_document(config: TransformerConfig, name: str) -> dict[str, Any]:
    """The fields of a DeepSeek's config.json that are not common to all classes."""
    latent, rope = config.latent, rope_parameters(config)
    document = {
        "model_type": "deepseek_v3" if name == DEEPSEEK_V3 else "deepseek_v2",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_head_dim,
        "qk_rope_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,  # read by transformers before 5
        "rope_parameters": rope,
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        **_mixture_document(config, name),
    }
    if name == DEEPSEEK_V3:
        depths = config.mtp.mtp_num_layers or 0
        document |= {"rope_interleave": True, "num_nextn_predict_layers": depths}
    if rope["rope_type"] != "default":  # read by transformers before 5
        document["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return document


def _mixture_document(config: TransformerConfig, name: str) -> dict[str, Any]:
    moe = config.experts
    if moe.num_experts is None:
        return {"first_k_dense_replace": config.num_layers}
    shared = moe.moe_shared_expert_intermediate_size or 0
    is_v3 = name == DEEPSEEK_V3
    return {
        "first_k_dense_replace": _dense_layers(config),
        "moe_layer_freq": 1,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "moe_intermediate_size": config.expert_ffn_size,
        "n_shared_experts": shared // config.expert_ffn_size,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
        "scoring_func": moe.moe_router_score_function,
        "topk_method": "noaux_tc" if is_v3 else "greedy",
        "norm_topk_prob": is_v3 and moe.moe_router_topk > 1,
        "n_group": moe.moe_router_num_groups or 1,
        "topk_group": moe.moe_router_group_topk or 1,
        "aux_loss_alpha": moe.moe_aux_loss_coeff,
        "seq_aux": moe.moe_router_load_balancing_type == "seq_aux_loss",
    }


# --- theirs to ours ---------------------------------------------------------------------------


def deepseek_values(fields: Fields, name: str, where: str) -> dict[str, Any]:
    """Options of a GPTConfig. The defaults are those of DeepseekV3Config where both have one."""
    check_layers(fields.need("num_hidden_layers", int), where)
    is_v3 = name == DEEPSEEK_V3
    positions = fields.get("max_position_embeddings", 4096 if is_v3 else 2048)
    fields.must_be("hidden_act", "silu", "swish")
    for bias in ("attention_bias", "mlp_bias"):
        fields.must_be(bias, False)
    fields.must_be("rope_interleave", True)
    fields.must_be("rms_norm_eps", EPSILON)
    return {
        "num_layers": fields.need("num_hidden_layers", int),
        "hidden_size": fields.need("hidden_size", int),
        "num_attention_heads": fields.need("num_attention_heads", int),
        "ffn_hidden_size": fields.need("intermediate_size", int),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "normalization": "RMSNorm",
        "norm_epsilon": EPSILON,
        "swiglu": True,
        "disable_bias_linear": True,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": fields.get("attention_dropout", 0.0),
        "untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", False),
        **read_rope(fields, positions, where, latents=True),
        **_parts(fields, name, where),
    }


def _parts(fields: Fields, name: str, where: str) -> dict[str, Any]:
    layers = fields.need("num_hidden_layers", int)
    dense = fields.get("first_k_dense_replace", 3 if name == DEEPSEEK_V3 else 0)
    has_no_experts = fields.stated("n_routed_experts") and not fields.raw("n_routed_experts")
    try:
        found: dict[str, Any] = {
            "mla": LatentConfig(
                multi_latent_attention=True,
                q_lora_rank=_width_of_queries(fields),
                kv_lora_rank=fields.get("kv_lora_rank", 512),
                qk_head_dim=fields.get("qk_nope_head_dim", 128),
                qk_pos_emb_head_dim=fields.get("qk_rope_head_dim", 64),
                v_head_dim=fields.get("v_head_dim", 128),
            )
        }
        if dense < layers and not has_no_experts:
            found["moe"] = _experts(fields, name, max(dense, 0), layers)
        if name == DEEPSEEK_V3 and (depths := fields.get("num_nextn_predict_layers", 1)) > 0:
            found["prediction"] = MTPConfig(mtp_num_layers=depths)
    except ConfigError as error:
        raise ArtifactError(f"{where} describes a model that cannot be built: {error}") from error
    for field in OF_EXPERTS:
        fields.raw(field)
    return found


def without_absent_layers(config: TransformerConfig, names: Collection[str]) -> TransformerConfig:
    """The model without multi-token prediction where files have none of its layers, as those that
    `transformers` saves. names: of the tensors in the files."""
    first = f"layers.{config.num_layers}."
    if not isinstance(config, GPTConfig) or config.mtp.mtp_num_layers is None:
        return config
    if any(name.removeprefix("model.").startswith(first) for name in names):
        return config
    return replace(config, prediction=MTPConfig())


def repeated_tables(config: TransformerConfig) -> dict[str, str]:
    """The copies of embedding and output layer that DeepSeek's files have in each layer of
    multi-token prediction, and the originals."""
    found = {}
    for layer in config.trained_layers[config.num_layers :]:
        found[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        tied = not config.untie_embeddings_and_output_weights
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        found[f"model.layers.{layer}.shared_head.head.weight"] = head
    return found


def _width_of_queries(fields: Fields) -> int | None:
    width = fields.maybe("q_lora_rank", int)
    return width if fields.stated("q_lora_rank") else 1536


def _experts(fields: Fields, name: str, dense: int, layers: int) -> MoEConfig:
    fields.must_be("moe_layer_freq", 1)
    is_v3, width = name == DEEPSEEK_V3, fields.get("moe_intermediate_size", 2048)
    common: dict[str, Any] = {
        "num_experts": fields.get("n_routed_experts", 256 if is_v3 else 64),
        "moe_layer_freq": "1" if not dense else f"[0]*{dense}+[1]*{layers - dense}",
        "moe_router_topk": fields.get("num_experts_per_tok", 8),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": (
            width * fields.get("n_shared_experts", 1 if is_v3 else 2)
        ),
        "moe_aux_loss_coeff": fields.get("aux_loss_alpha", 0.0),
        "moe_router_dtype": "fp32",
    }
    if fields.get("seq_aux", True):
        common["moe_router_load_balancing_type"] = "seq_aux_loss"
    factor = fields.get("routed_scaling_factor", 2.5 if is_v3 else 1.0)
    if factor != 1.0:
        common["moe_router_topk_scaling_factor"] = factor
    groups, chosen = fields.maybe("n_group", int), fields.maybe("topk_group", int)
    if not is_v3:
        fields.must_be("topk_method", "greedy")
        fields.must_be("scoring_func", "softmax")
        fields.must_be("norm_topk_prob", False)
        return MoEConfig(moe_router_pre_softmax=True, **common)
    fields.must_be("topk_method", "noaux_tc")
    fields.must_be("scoring_func", "sigmoid")
    # Of one expert the weight is never divided by itself here.
    fields.must_be("norm_topk_prob", common["moe_router_topk"] > 1, default=True)
    groups = groups if fields.stated("n_group") else 8
    chosen = chosen if fields.stated("topk_group") else 4
    if groups is not None and groups > 1:
        common |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
        summed = common["moe_router_topk"] // (chosen or 1)
        if summed != SUMMED:
            raise ConfigError(
                f"num_experts_per_tok / topk_group is {summed}; scores of {SUMMED} experts of a "
                "group are added up here only where a token visits as many of it"
            )
    return MoEConfig(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, **common
    )
