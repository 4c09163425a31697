"""Options of our GPT that a class of `transformers` cannot have, by class."""

from __future__ import annotations

from trainyard.models.config import TransformerConfig


def llama_misfits(config: TransformerConfig) -> list[str]:
    """Of LlamaForCausalLM."""
    return [*rotary_misfits(config), *_extras(config, qkv_bias=False, qk_norm=False)]


def mistral_misfits(config: TransformerConfig) -> list[str]:
    """Of MistralForCausalLM."""
    found = [*rotary_misfits(config), *_extras(config, window=True, qkv_bias=False, qk_norm=False)]
    if len({config.attention_window(layer) for layer in range(config.num_layers)}) > 1:
        found.append("--window-attn-skip-freq")
    return found


def qwen2_misfits(config: TransformerConfig) -> list[str]:
    """Of Qwen2ForCausalLM."""
    return [*rotary_misfits(config), *_extras(config, qkv_bias=True, qk_norm=False)]


def qwen3_misfits(config: TransformerConfig) -> list[str]:
    """Of Qwen3ForCausalLM."""
    return [*rotary_misfits(config), *_extras(config, qkv_bias=False, qk_norm=True)]


def mixtral_misfits(config: TransformerConfig) -> list[str]:
    """Of MixtralForCausalLM."""
    moe = config.experts
    windows = {config.attention_window(layer) for layer in range(config.num_layers)}
    rules = {
        "--add-qkv-bias": config.add_qkv_bias,
        "--qk-layernorm": config.qk_layernorm,
        "--window-attn-skip-freq": len(windows) > 1,
        "--moe-router-pre-softmax": moe.moe_router_pre_softmax,
        f"--moe-layer-freq {moe.moe_layer_freq} (every layer must have experts)": (
            not all(moe.pattern(config.num_layers))
        ),
    }
    found = [text for text, broken in rules.items() if broken]
    return [*rotary_misfits(config), *_mixture_misfits(config), *found]


def qwen3_moe_misfits(config: TransformerConfig) -> list[str]:
    """Of Qwen3MoeForCausalLM."""
    return [*qwen3_misfits(config), *_mixture_misfits(config)]


def _mixture_misfits(config: TransformerConfig) -> list[str]:
    """Options of routers that neither class computes."""
    moe = config.experts
    rules = {
        f"--moe-router-score-function {moe.moe_router_score_function}": (
            moe.moe_router_score_function != "softmax"
        ),
        "--moe-shared-expert-intermediate-size": (
            moe.moe_shared_expert_intermediate_size is not None
        ),
        "--moe-router-topk-scaling-factor": moe.moe_router_topk_scaling_factor is not None,
        "--moe-router-num-groups": moe.moe_router_num_groups is not None,
        "--moe-expert-capacity-factor": moe.moe_expert_capacity_factor is not None,
    }
    return [text for text, broken in rules.items() if broken]


def rotary_misfits(config: TransformerConfig) -> list[str]:
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
        **unknown_to_all(config),
    }
    return [text for text, broken in rules.items() if broken]


def _extras(
    config: TransformerConfig, *, qkv_bias: bool, qk_norm: bool, window: bool = False
) -> list[str]:
    """Options in which the classes like Llama's differ."""
    rules = {
        _wanted("--add-qkv-bias", qkv_bias): config.add_qkv_bias != qkv_bias,
        _wanted("--qk-layernorm", qk_norm): config.qk_layernorm != qk_norm,
        _wanted("--window-size", window): (config.window_size is not None) != window,
    }
    return [text for text, broken in rules.items() if broken]


def _wanted(option: str, wanted: bool) -> str:
    return f"no {option}" if wanted else option


def unknown_to_all(config: TransformerConfig) -> dict[str, bool]:
    """Options that no class here has, and whether each is given."""
    return {
        "--apply-layernorm-1p": config.apply_layernorm_1p,
        "--qk-l2-norm": config.qk_l2_norm,
        "--moe-apply-probs-on-input": config.experts.moe_apply_probs_on_input,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
    }


def gpt2_misfits(config: TransformerConfig) -> list[str]:
    """Of GPT2LMHeadModel."""
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
        **unknown_to_all(config),
    }
    return [text for text, broken in rules.items() if broken]
