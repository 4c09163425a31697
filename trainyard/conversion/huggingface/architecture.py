"""Finds the class of `transformers` that computes what our GPT does. No torch here.

    rotary, RMSNorm, SwiGLU, no linear biases   LlamaForCausalLM (tied or not, grouped queries)
      and a window on every layer               MistralForCausalLM
      and QKV biases                            Qwen2ForCausalLM
      and normalised queries and keys           Qwen3ForCausalLM
    learned positions, LayerNorm, GELU, biases  GPT2LMHeadModel (tied)
    as Llama, with experts in every layer       MixtralForCausalLM
    as Qwen3, with experts in some layers       Qwen3MoeForCausalLM
    Mamba-2 alone, or with attention and MLPs   Mamba2ForCausalLM, NemotronHForCausalLM (`mamba`)

Rotary embedding may be scaled linearly, as in Llama 3.1, or by YaRN. Any other model raises a
ConfigError that names the options that no class has."""

from __future__ import annotations

from trainyard.conversion.huggingface.bert import bert_architecture
from trainyard.conversion.huggingface.mamba import mamba_architecture
from trainyard.conversion.huggingface.t5 import t5_architecture
from trainyard.errors import ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.t5.config import T5Config

LLAMA = "LlamaForCausalLM"
MISTRAL = "MistralForCausalLM"
QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
GPT2 = "GPT2LMHeadModel"
MIXTRAL = "MixtralForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"


def _llama_misfits(config: TransformerConfig) -> list[str]:
    return [*_rotary_misfits(config), *_extras(config, qkv_bias=False, qk_norm=False)]


def _mistral_misfits(config: TransformerConfig) -> list[str]:
    found = [*_rotary_misfits(config), *_extras(config, window=True, qkv_bias=False, qk_norm=False)]
    if len({config.attention_window(layer) for layer in range(config.num_layers)}) > 1:
        found.append("--window-attn-skip-freq")
    return found


def _qwen2_misfits(config: TransformerConfig) -> list[str]:
    return [*_rotary_misfits(config), *_extras(config, qkv_bias=True, qk_norm=False)]


def _qwen3_misfits(config: TransformerConfig) -> list[str]:
    return [*_rotary_misfits(config), *_extras(config, qkv_bias=False, qk_norm=True)]


def _mixtral_misfits(config: TransformerConfig) -> list[str]:
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
    return [*_rotary_misfits(config), *_mixture_misfits(config), *found]


def _qwen3_moe_misfits(config: TransformerConfig) -> list[str]:
    return [*_qwen3_misfits(config), *_mixture_misfits(config)]


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


def _rotary_misfits(config: TransformerConfig) -> list[str]:
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


def _extras(
    config: TransformerConfig, *, qkv_bias: bool, qk_norm: bool, window: bool = False
) -> list[str]:
    rules = {
        _wanted("--add-qkv-bias", qkv_bias): config.add_qkv_bias != qkv_bias,
        _wanted("--qk-layernorm", qk_norm): config.qk_layernorm != qk_norm,
        _wanted("--window-size", window): (config.window_size is not None) != window,
    }
    return [text for text, broken in rules.items() if broken]


def _wanted(option: str, wanted: bool) -> str:
    return f"no {option}" if wanted else option


def _unknown_to_all(config: TransformerConfig) -> dict[str, bool]:
    return {
        "--apply-layernorm-1p": config.apply_layernorm_1p,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
    }


def _gpt2_misfits(config: TransformerConfig) -> list[str]:
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
WITH_EXPERTS = {MIXTRAL: _mixtral_misfits, QWEN3_MOE: _qwen3_moe_misfits}
"""The same for models with experts."""


def architecture(config: TransformerConfig) -> str:
    """The class of `transformers` that computes the same; ConfigError says why none does."""
    if isinstance(config, BertConfig):
        return bert_architecture(config)
    if isinstance(config, T5Config):
        return t5_architecture(config)
    if isinstance(config, MambaConfig):
        return mamba_architecture(config)
    if config.model_type == "retro":
        raise ConfigError(
            "--saver hf: transformers has no Retro; keep the checkpoint in our format (--saver "
            "trainyard)"
        )
    classes = WITH_EXPERTS if config.experts.enabled else MISFITS
    misfits = {name: found(config) for name, found in classes.items()}
    for name, broken in misfits.items():
        if not broken:
            return name
    reasons = "; ".join(f"{name}: {', '.join(broken)}" for name, broken in misfits.items())
    raise ConfigError(
        "--saver hf: no Hugging Face architecture fits this model. Options that each cannot have: "
        f"{reasons}. Keep the checkpoint in our format (--saver trainyard)"
    )
