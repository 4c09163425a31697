"""Converts our options to the `args` of a Megatron-LM checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.conversion.megatron.args import OF_T5, SAME_NAME
from trainyard.conversion.megatron.expert_args import expert_args
from trainyard.conversion.megatron.latent_args import latent_args
from trainyard.conversion.megatron.mamba_args import hybrid_args
from trainyard.conversion.megatron.retro_args import retro_args
from trainyard.errors import ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import LLAMA3_LENGTH, TransformerConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.retro.config import RetroConfig
from trainyard.models.t5.config import T5Config
from trainyard.parallel.pipeline.partition import Partition, stages_in_order

WHOLE_NUMBERS = ("rotary_base", "rotary_seq_len_interpolation_factor")
"""Arguments that Megatron-LM's parser requires to be integers."""

KEPT_ARGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads"),
    *("num_query_groups", "group_query_attention", "kv_channels", "max_position_embeddings"),
    *("position_embedding_type", "add_position_embedding", "use_rotary_position_embeddings"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear", "add_qkv_bias"),
    *("squared_relu", "swiglu", "untie_embeddings_and_output_weights", "apply_layernorm_1p"),
    *("normalization", "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout"),
    *("mtp_use_repeated_layer", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk"),
    *("moe_token_dispatcher_type", "moe_router_pre_softmax", "moe_grouped_gemm"),
    *("moe_single_grouped_weight", "moe_single_grouped_bias", "moe_router_score_function"),
    *("moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "mamba_state_dim"),
    *("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "tokenizer_model"),
    *("tokenizer_type", "tiktoken_pattern", "data_parallel_random_init", "global_batch_size"),
)
"""Arguments that a conversion keeps: Megatron-LM's loader takes them from a checkpoint, or compares
them with its own."""


def args_of(
    config: TransformerConfig,
    *,
    padded_vocab_size: int,
    vocab_size: int,
    tp: int,
    ep: int,
    split: Partition,
    is_legacy: bool,
    transformer_impl: str,
    dtype: str,
    source_args: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments for the model and its layout, enough for Megatron-LM's own checks and for
    --use-checkpoint-args.

    dtype: of the weights, by safetensors' name. source_args: the arguments of the Megatron-LM run
    that trained the model, or {}. KEPT_ARGS of them are kept, so that the command of that run can
    load the result.
    Raises ConfigError for a model that Megatron-LM's arguments cannot describe."""
    _refuse(config)
    kept = {name: source_args[name] for name in KEPT_ARGS if source_args.get(name) is not None}
    return {
        **_model_args(config),
        **kept,
        **_layout_args(tp, ep, split),
        "padded_vocab_size": padded_vocab_size,
        "vocab_size": vocab_size if vocab_size < padded_vocab_size else None,
        "true_vocab_size": vocab_size,
        "use_legacy_models": is_legacy,
        "transformer_impl": transformer_impl,
        "bf16": dtype == "BF16",
        "fp16": dtype == "F16",
        "ckpt_format": "torch",
        "use_distributed_optimizer": False,
        **expert_args(config),
        **latent_args(config),
    }


def _refuse(config: TransformerConfig) -> None:
    if config.quick_gelu:
        raise ConfigError(
            "Megatron-LM has no argument for --quick-gelu without a gate; use --saver hf"
        )
    original = config.rope_scaling_original_max_position_embeddings
    if config.use_rope_scaling and original != LLAMA3_LENGTH:
        raise ConfigError(
            f"--rope-scaling-original-max-position-embeddings must be {LLAMA3_LENGTH} for "
            f"Megatron-LM, got {original}; use --saver hf, or keep the checkpoint in our format "
            "(--saver trainyard)"
        )


def _model_args(config: TransformerConfig) -> dict[str, Any]:
    """Of the model, but for its experts and latents."""
    values = {
        **{name: getattr(config, name) for name in SAME_NAME},
        **_family_args(config),
        "ffn_hidden_size": config.ffn_size,
        "kv_channels": config.head_dim,
        "max_position_embeddings": config.positions,
        "num_query_groups": config.num_query_groups,
        "position_embedding_type": config.position_embedding_type,
        # True would make Megatron-LM's loader use rope for a model of any other kind.
        "use_rotary_position_embeddings": config.position_embedding_type == "rope",
        # Megatron-LM's parser leaves it True for every kind of positions.
        "add_position_embedding": True,
        "add_bias_linear": config.linear_bias,
        "window_size": _sides(config.window_size),
        "window_attn_skip_freq": _frequency(config.window_attn_skip_freq),
    }
    for name in WHOLE_NUMBERS:
        value = values[name]
        values[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return values | (hybrid_args(config) if isinstance(config, MambaConfig) else {})


def _family_args(config: TransformerConfig) -> dict[str, Any]:
    """Of a BERT, a T5 or a Retro."""
    if isinstance(config, RetroConfig):
        return retro_args(config)
    if not isinstance(config, BertConfig | T5Config):
        return {}
    values = {"encoder_seq_length": config.seq_length, "encoder_num_layers": config.num_layers}
    if isinstance(config, BertConfig):
        return {"bert_binary_head": config.bert_binary_head, **values}
    return {
        **{name: getattr(config, name) for name in OF_T5 if name != "model_type"},
        **values,
        "decoder_num_layers": config.decoder_layers,
        "decoder_seq_length": config.decoder_length,
    }


def _layout_args(tp: int, ep: int, split: Partition) -> dict[str, Any]:
    """Of the ranks."""
    pp, vpp = len(split), len(split[0])
    sizes = {len(stage.layers) for stage in stages_in_order(split)}
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_layers_per_virtual_pipeline_stage": (
            sizes.pop() if vpp > 1 and len(sizes) == 1 else None
        ),
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
        "context_parallel_size": 1,
        "data_parallel_size": ep,
        "world_size": tp * pp * ep,
    }


def _sides(window: str | None) -> tuple[int, ...] | None:
    return None if window is None else tuple(int(side) for side in window.strip(" ()").split(","))


def _frequency(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text
