"""gpt-oss (arXiv:2508.10925) in `transformers`: what our models need to be it, and its config.json.

Grouped queries with biases and a learnt sink for every head, windows on some layers, experts with
biases in all, whose gated activation is bounded and moved (--quick-geglu)."""

from __future__ import annotations

from typing import Any

from trainyard.checkpoint.bounds import check_layers
from trainyard.conversion.fields import Fields
from trainyard.conversion.huggingface.rope import read_rope, rope_parameters
from trainyard.conversion.huggingface.windows import tokens_seen, window_of_layers
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.moe_config import MoEConfig

GPT_OSS = "GptOssForCausalLM"

OFFSET = 1.0
"""Added to the up projection."""
ALPHA = 1.702
"""Of quick_gelu."""
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
    "rope_theta": 150000.0,
}

HARMLESS = ("auto_map", "initial_context_length", "swiglu_alpha")
"""Fields that follow from others or do not change the logits."""


def gpt_oss_misfits(config: TransformerConfig) -> list[str]:
    """Of GptOssForCausalLM."""
    moe = config.experts
    limit, kind = config.activation_func_clamp_value, config.position_embedding_type
    rules = {
        f"--position-embedding-type {kind} (must be rope or yarn)": not config.rotary,
        f"--rotary-percent {config.rotary_percent} (must be 1.0)": config.rotary_percent != 1.0,
        "--rotary-interleaved": config.rotary_interleaved,
        f"--normalization {config.normalization} (must be RMSNorm)": (
            config.normalization != "RMSNorm"
        ),
        "--apply-layernorm-1p": config.apply_layernorm_1p,
        "--qk-layernorm": config.qk_layernorm,
        "--qk-l2-norm": config.qk_l2_norm,
        f"--softmax-type {config.softmax_type} (must be learnable)": (
            config.softmax_type != "learnable"
        ),
        "no --quick-geglu": not config.quick_geglu,
        "no --activation-func-clamp-value": limit is None,
        f"--glu-linear-offset {config.glu_linear_offset} (must be {OFFSET})": (
            config.glu_linear_offset != OFFSET
        ),
        "--disable-bias-linear": config.disable_bias_linear,
        f"--moe-layer-freq {moe.moe_layer_freq} (every layer must have experts)": (
            not all(moe.pattern(config.num_layers))
        ),
        f"--moe-router-score-function {moe.moe_router_score_function}": (
            moe.moe_router_score_function != "softmax"
        ),
        "--moe-router-pre-softmax": moe.moe_router_pre_softmax,
        "--moe-shared-expert-intermediate-size": (
            moe.moe_shared_expert_intermediate_size is not None
        ),
        "--moe-router-topk-scaling-factor": moe.moe_router_topk_scaling_factor is not None,
        "--moe-router-num-groups": moe.moe_router_num_groups is not None,
        "--moe-expert-capacity-factor": moe.moe_expert_capacity_factor is not None,
    }
    return [text for text, broken in rules.items() if broken]


def gpt_oss_document(config: TransformerConfig) -> dict[str, Any]:
    """The fields of a gpt-oss's config.json that are not common to all classes."""
    moe, rope = config.experts, rope_parameters(config)
    windows = [config.attention_window(layer) for layer in range(config.num_layers)]
    document = {
        "model_type": "gpt_oss",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,  # read by transformers before 5
        "rope_parameters": rope,
        "attention_bias": True,
        "attention_dropout": config.attention_dropout,
        "sliding_window": next(filter(None, map(tokens_seen, windows)), None),
        "layer_types": [
            "full_attention" if tokens_seen(window) is None else "sliding_attention"
            for window in windows
        ],
        "swiglu_limit": config.activation_func_clamp_value,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "router_aux_loss_coef": moe.moe_aux_loss_coeff,
        "output_router_logits": False,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }
    if rope["rope_type"] != "default":  # read by transformers before 5
        document["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return document


def gpt_oss_values(fields: Fields, where: str) -> dict[str, Any]:
    """Options of a GPTConfig."""
    layers = fields.need("num_hidden_layers", int)
    check_layers(layers, where)
    heads, hidden = fields.need("num_attention_heads", int), fields.need("hidden_size", int)
    positions = fields.get("max_position_embeddings", 131072)
    fields.must_be("hidden_act", "silu", "swish")
    fields.must_be("attention_bias", True)
    fields.must_be("swiglu_alpha", ALPHA)
    _check_packing(fields, where)
    groups, width = fields.get("num_key_value_heads", 8), fields.get("intermediate_size", 2880)
    grouped = {"group_query_attention": True, "num_query_groups": groups}
    try:
        experts = MoEConfig(
            num_experts=fields.get("num_local_experts", 128),
            moe_router_topk=_topk(fields, where),
            moe_ffn_hidden_size=width,
            moe_aux_loss_coeff=fields.get("router_aux_loss_coef", 0.001),
        )
    except ConfigError as error:
        raise ArtifactError(f"{where} describes experts that cannot be built: {error}") from error
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": width,
        "kv_channels": fields.get("head_dim", 64),
        **(grouped if groups != heads else {}),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "normalization": "RMSNorm",
        "norm_epsilon": fields.get("rms_norm_eps", 1e-5),
        "quick_geglu": True,
        "activation_func_clamp_value": fields.get("swiglu_limit", 7.0),
        "glu_linear_offset": OFFSET,
        "softmax_type": "learnable",
        "hidden_dropout": 0.0,
        "attention_dropout": fields.get("attention_dropout", 0.0),
        "untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", False),
        "moe": experts,
        **_rope(fields, positions, where),
        **_windows(fields, layers, where),
    }


def _check_packing(fields: Fields, where: str) -> None:
    """Experts may be in MXFP4, which `mxfp4` reads."""
    packing = fields.raw("quantization_config")
    if packing is None:
        return
    method = packing.get("quant_method") if isinstance(packing, dict) else packing
    if method != "mxfp4":
        raise ConfigError(
            f"{where}: weights are quantised by {method!r:.40}, and this version reads only mxfp4; "
            "convert them to bfloat16 with transformers"
        )


def _topk(fields: Fields, where: str) -> int:
    """`num_experts_per_tok`, which OpenAI's files have under a second name."""
    topk, other = fields.get("num_experts_per_tok", 4), fields.maybe("experts_per_token", int)
    if other not in (None, topk):
        raise ArtifactError(
            f"{where}: num_experts_per_tok is {topk} and experts_per_token {other}; make them agree"
        )
    return topk


def _rope(fields: Fields, positions: int, where: str) -> dict[str, Any]:
    if fields.raw("rope_parameters") is None and fields.raw("rope_scaling") is None:
        theta = fields.maybe("rope_theta", float) or DEFAULT_ROPE["rope_theta"]
        fields = Fields({"rope_parameters": DEFAULT_ROPE | {"rope_theta": theta}}, where)
    return read_rope(fields, positions, where)


def _windows(fields: Fields, layers: int, where: str) -> dict[str, Any]:
    """On every other layer from the first one on, where the file names none."""
    width = fields.maybe("sliding_window", int) if fields.stated("sliding_window") else 128
    if fields.raw("layer_types") is not None:
        return window_of_layers(fields, width, where)
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    own = {"num_hidden_layers": layers, "layer_types": kinds}
    return window_of_layers(Fields(own, where), width, where)
