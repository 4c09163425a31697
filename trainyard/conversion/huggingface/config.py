"""Writes the config.json of `transformers` for our models."""

from __future__ import annotations

import logging
from typing import Any

from trainyard.conversion.huggingface.architecture import (
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    architecture,
)
from trainyard.conversion.huggingface.bert import bert_document
from trainyard.conversion.huggingface.deepseek import DEEPSEEK_V3, DEEPSEEKS, deepseek_document
from trainyard.conversion.huggingface.gpt_oss import GPT_OSS, gpt_oss_document
from trainyard.conversion.huggingface.mamba import mamba_document
from trainyard.conversion.huggingface.rope import rope_parameters
from trainyard.conversion.huggingface.t5 import t5_document
from trainyard.conversion.huggingface.windows import tokens_seen
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.t5.config import T5Config

log = logging.getLogger(__name__)

GPT2_ACTIVATIONS = {
    **{"gelu_tanh": "gelu_new", "gelu": "gelu"},
    **{"quick_gelu": "quick_gelu", "squared_relu": "relu2"},
}


def model_document(config: TransformerConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """The config.json of `transformers`, without the tokenizer's special ids."""
    name = architecture(config)
    if config.mtp.mtp_num_layers is not None and name != DEEPSEEK_V3:
        log.warning(
            "layers of multi-token prediction are left out: %s has none, and computes the same "
            "logits without them",
            name,
        )
    common = {
        "architectures": [name],
        "dtype": dtype,
        "torch_dtype": dtype,  # read by transformers before 4.56
        "vocab_size": vocab_size,
        "initializer_range": config.init_method_std,
        "use_cache": True,
    }
    if isinstance(config, BertConfig):
        return common | bert_document(config)
    if isinstance(config, T5Config):
        return common | t5_document(config)
    if isinstance(config, MambaConfig):
        return common | mamba_document(config, name)
    if name == GPT2:
        return common | _gpt2_document(config)
    if name in DEEPSEEKS:
        return common | deepseek_document(config, name)
    if name == GPT_OSS:
        return common | gpt_oss_document(config)
    return common | _llama_document(config) | _own_fields(config, name)


def _llama_document(config: TransformerConfig) -> dict[str, Any]:
    rope = rope_parameters(config)
    document = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,  # read by transformers before 5
        "rope_parameters": rope,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }
    if rope["rope_type"] != "default":  # read by transformers before 5
        document["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return document


def _own_fields(config: TransformerConfig, name: str) -> dict[str, Any]:
    """The fields of each class that are not common to all."""
    window = config.attention_window(0)
    no_biases = {"attention_bias": False, "use_sliding_window": False}
    fields: dict[str, dict[str, Any]] = {
        LLAMA: {"model_type": "llama", "attention_bias": False, "mlp_bias": False},
        MISTRAL: {"model_type": "mistral", "sliding_window": tokens_seen(window)},
        QWEN2: {"model_type": "qwen2", "use_sliding_window": False},
        QWEN3: {"model_type": "qwen3", **no_biases},
        MIXTRAL: {"model_type": "mixtral", "sliding_window": tokens_seen(window)},
        QWEN3_MOE: {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "use_sliding_window": False,
        },
    }
    return fields[name] | _mixture_fields(config, name)


def _mixture_fields(config: TransformerConfig, name: str) -> dict[str, Any]:
    moe = config.experts
    if moe.num_experts is None:
        return {}
    common = {
        "num_experts_per_tok": moe.moe_router_topk,
        "router_aux_loss_coef": moe.moe_aux_loss_coeff,
        "output_router_logits": False,
    }
    if name == MIXTRAL:
        return common | {
            "num_local_experts": moe.num_experts,
            "intermediate_size": config.expert_ffn_size,
            "router_jitter_noise": 0.0,
        }
    pattern = enumerate(moe.pattern(config.num_layers))
    return common | {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": config.expert_ffn_size,
        "norm_topk_prob": not moe.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in pattern if not has_experts],
    }


def _gpt2_document(config: TransformerConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_positions": config.positions,
        "activation_function": GPT2_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": True,
    }
