"""Finds the class of `transformers` that computes what our GPT does. No torch here.

    rotary, RMSNorm, SwiGLU, no linear biases   LlamaForCausalLM (tied or not, grouped queries)
      and a window on every layer               MistralForCausalLM
      and QKV biases                            Qwen2ForCausalLM
      and normalised queries and keys           Qwen3ForCausalLM
    learned positions, LayerNorm, GELU, biases  GPT2LMHeadModel (tied)
    as Llama, with experts in every layer       MixtralForCausalLM
    as Qwen3, with experts in some layers       Qwen3MoeForCausalLM
    experts with biases, learnt sinks           GptOssForCausalLM (quick-geglu, bounded and moved)
    multi-latent attention, sigmoid scores      DeepseekV3ForCausalLM (dense layers first, or all)
    multi-latent attention, softmax scores      DeepseekV2ForCausalLM
    Mamba-2 alone, or with attention and MLPs   Mamba2ForCausalLM, NemotronHForCausalLM (`mamba`)

Rotary embedding may be scaled linearly, as in Llama 3.1, or by YaRN. Any other model raises a
ConfigError that names the options that no class has."""

from __future__ import annotations

from trainyard.conversion.huggingface.bert import bert_architecture
from trainyard.conversion.huggingface.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    deepseek_v2_misfits,
    deepseek_v3_misfits,
)
from trainyard.conversion.huggingface.gpt_oss import GPT_OSS, gpt_oss_misfits
from trainyard.conversion.huggingface.mamba import mamba_architecture
from trainyard.conversion.huggingface.misfits import (
    gpt2_misfits,
    llama_misfits,
    mistral_misfits,
    mixtral_misfits,
    qwen2_misfits,
    qwen3_misfits,
    qwen3_moe_misfits,
)
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


MISFITS = {
    LLAMA: llama_misfits,
    MISTRAL: mistral_misfits,
    QWEN2: qwen2_misfits,
    QWEN3: qwen3_misfits,
    GPT2: gpt2_misfits,
}
WITH_EXPERTS = {
    MIXTRAL: mixtral_misfits,
    QWEN3_MOE: qwen3_moe_misfits,
    GPT_OSS: gpt_oss_misfits,
}
"""The same for models with experts."""
WITH_LATENTS = {DEEPSEEK_V3: deepseek_v3_misfits, DEEPSEEK_V2: deepseek_v2_misfits}
"""The same for models with multi-latent attention."""


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
    if config.latent.enabled:
        classes = WITH_LATENTS
    misfits = {name: found(config) for name, found in classes.items()}
    for name, broken in misfits.items():
        if not broken:
            return name
    reasons = "; ".join(f"{name}: {', '.join(broken)}" for name, broken in misfits.items())
    raise ConfigError(
        "--saver hf: no Hugging Face architecture fits this model. Options that each cannot have: "
        f"{reasons}. Keep the checkpoint in our format (--saver trainyard)"
    )
