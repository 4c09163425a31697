"""Converts the `args` of a Megatron-LM checkpoint to our options, and back.

Every argument that changes what the model computes is read or refused by name. Arguments that only
concern training or speed are ignored. Names are the parser's destinations, of all releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainyard.artifacts.strict_json import shown
from trainyard.checkpoint.bounds import check_layers
from trainyard.config import from_dict
from trainyard.conversion.megatron.expert_args import MAX_PATTERN, expert_args, experts_of
from trainyard.conversion.megatron.latent_args import latent_args, latents_of
from trainyard.conversion.megatron.mamba_args import OF_HYBRIDS, hybrid_args, hybrid_values
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import LLAMA3_LENGTH, TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.t5.config import T5Config
from trainyard.parallel.pipeline.partition import Partition, stages_in_order

SAME_NAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
    *("group_query_attention", "seq_length", "make_vocab_size_divisible_by"),
    *("max_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast"),
    *("yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim"),
    *("yarn_correction_range_round_to_int", "normalization", "norm_epsilon"),
    *("apply_layernorm_1p", "fp32_residual_connection", "hidden_dropout", "attention_dropout"),
    *("add_qkv_bias", "qk_layernorm", "softmax_type", "attention_softmax_in_fp32"),
    *("apply_query_key_layer_scaling", "swiglu", "quick_geglu", "squared_relu", "openai_gelu"),
    *("bias_gelu_fusion", "untie_embeddings_and_output_weights", "init_method_std"),
    *("embedding_init_method_std", "init_method_xavier_uniform"),
)
"""Fields of TransformerConfig that are arguments of the same name and meaning."""

FLOATS = (
    *("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "norm_epsilon"),
    *("rope_scaling_factor", "hidden_dropout", "attention_dropout", "init_method_std"),
    *("yarn_rotary_scaling_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale"),
    *("yarn_mscale_all_dim", "embedding_init_method_std"),
)

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

REFUSED: dict[str, tuple[Any, ...]] = {
    "moe_latent_size": (None, 0),
    "moe_use_legacy_grouped_gemm": (None, False),
    "moe_apply_probs_on_input": (None, False),
    "mtp_use_repeated_layer": (None, False),
    "spec": (None, []),
    "retro_add_retriever": (None, False),
    "hybrid_override_pattern": (None, ""),
    "hybrid_layer_pattern": (None, ""),
    "hybrid_attention_ratio": (None, 0.0),
    "hybrid_mlp_ratio": (None, 0.0),
    "is_hybrid_model": (None, False),
    "heterogeneous_layers_config_path": (None, ""),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "apply_residual_connection_post_layernorm": (None, False),
    "no_rope_freq": (None, 0),
    "qk_l2_norm": (None, False),
    "use_mup": (None, False),
    "attention_output_gate": (None, False),
    "enable_hyper_connections": (None, False),
    "mrope_section": (None,),
    "onnx_safe": (None, False),
}
"""Arguments that change the model in a way that ours does not compute, each with the values that do
not."""

MAX_INT = 2**63 - 1
POSITIONS = ("learned_absolute", "rope", "yarn", "none")


OF_BERT = ("model_type", "bert_binary_head", "num_tokentypes")
"""What the reader adds to the arguments of a BERT, from its tensors."""

OF_T5 = (
    *("model_type", "decoder_num_layers", "decoder_seq_length", "softmax_scale"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
)
"""Arguments of a T5, some of which the reader adds from its tensors."""


def config_of(args: Mapping[str, Any], where: str) -> TransformerConfig:
    """The configuration that the arguments of a checkpoint describe.

    Raises ConfigError for a model that ours does not compute, ArtifactError for arguments that
    describe no model."""
    for name, value in args.items():
        if type(value) is int and abs(value) > MAX_INT:  # the integers of a pickle have no bound
            raise ArtifactError(f"{where}: {name} is a number of {value.bit_length()} bits")
    _refuse(args, where)
    values = {name: args[name] for name in SAME_NAME if args.get(name) is not None}
    for name in FLOATS:
        if type(values.get(name)) is int:
            values[name] = float(values[name])
    if "layernorm_epsilon" in args:
        values.setdefault("norm_epsilon", args["layernorm_epsilon"])
    if args.get("group_query_attention"):
        values["num_query_groups"] = args.get("num_query_groups") or 1
    if args.get("add_bias_linear") is False:
        values["disable_bias_linear"] = True
    values["position_embedding_type"] = _positions(args, where)
    values |= experts_of(args, where)
    values |= latents_of(args)
    values |= _window(args, where)
    if args.get("model_type") == "mamba":
        values |= hybrid_values(args, where)
    if type(values.get("num_layers")) is int:
        check_layers(values["num_layers"], where)
    try:
        if args.get("model_type") == "bert":
            return from_dict(BertConfig, values | {name: args[name] for name in OF_BERT}, "args")
        if args.get("model_type") == "t5":
            return from_dict(T5Config, values | _of_t5(args), "args")
        if args.get("model_type") == "mamba":
            return from_dict(MambaConfig, values, "args")
        return from_dict(GPTConfig, values, "args")
    except ConfigError as error:
        raise ArtifactError(f"{where}: describes no model: {error!s:.500}") from error


def _of_t5(args: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: args[name] for name in OF_T5 if args.get(name) is not None}
    if type(found.get("softmax_scale")) is int:
        found["softmax_scale"] = float(found["softmax_scale"])
    if args.get("seq_length") is None and args.get("encoder_seq_length") is not None:
        found["seq_length"] = args["encoder_seq_length"]
    return found


def _refuse(args: Mapping[str, Any], where: str) -> None:
    is_hybrid = args.get("model_type") == "mamba"
    found = [
        f"{name} ({args[name]!r:.40})"
        for name, harmless in REFUSED.items()
        if name in args and args[name] not in harmless and not (is_hybrid and name in OF_HYBRIDS)
    ]
    if found:
        raise ConfigError(
            f"{where}: is a model with {', '.join(found)}, which this version of trainyard does "
            "not compute"
        )


def _positions(args: Mapping[str, Any], where: str) -> str:
    kind = args.get("position_embedding_type")
    if kind in (None, "learned_absolute"):
        if args.get("use_rotary_position_embeddings"):
            return "rope"
        return "none" if args.get("add_position_embedding") is False else "learned_absolute"
    known = (*POSITIONS, "relative") if args.get("model_type") == "t5" else POSITIONS
    if kind not in known:
        raise ConfigError(
            f"{where}: is a model with --position-embedding-type {kind!s:.40}; this version of "
            f"trainyard computes only {', '.join(known)}"
        )
    return str(kind)


def _window(args: Mapping[str, Any], where: str) -> dict[str, str]:
    window, freq = args.get("window_size"), args.get("window_attn_skip_freq")
    if window is None:
        return {}
    sides = window.split(",") if isinstance(window, str) else window
    if not isinstance(sides, list | tuple) or len(str(freq)) > MAX_PATTERN:
        raise ArtifactError(
            f"{where}: window_size {shown(window)} and window_attn_skip_freq {shown(freq)} "
            "describe no window"
        )
    found = {"window_size": ",".join(str(side).strip(" ()") for side in sides)}
    if freq is not None:
        found["window_attn_skip_freq"] = str(freq).replace(" ", "")
    return found


# --- ours to theirs ---------------------------------------------------------------------------


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
    values = {name: getattr(config, name) for name in SAME_NAME}
    if isinstance(config, BertConfig):
        values |= {
            "bert_binary_head": config.bert_binary_head,
            "encoder_seq_length": config.seq_length,
            "encoder_num_layers": config.num_layers,
        }
    if isinstance(config, T5Config):
        values |= {name: getattr(config, name) for name in OF_T5 if name != "model_type"}
        values |= {
            "encoder_seq_length": config.seq_length,
            "encoder_num_layers": config.num_layers,
            "decoder_num_layers": config.decoder_layers,
            "decoder_seq_length": config.decoder_length,
        }
    values |= {
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
    if isinstance(config, MambaConfig):
        values |= hybrid_args(config)
    values |= {name: source_args[name] for name in KEPT_ARGS if source_args.get(name) is not None}
    pp, vpp = len(split), len(split[0])
    sizes = {len(stage.layers) for stage in stages_in_order(split)}
    return values | {
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


def refuse_for_megatron(config: TransformerConfig, pp: int) -> None:
    """Refuse a BERT or T5 that Megatron-LM does not compute, and every Retro. pp: pipeline ranks to
    write."""
    if config.model_type == "retro":
        raise ConfigError(
            "a Retro is not written in Megatron-LM's formats; keep the checkpoint in our format "
            "(--saver trainyard)"
        )
    if isinstance(config, T5Config):
        _refuse_t5(config, pp)
    if config.position_embedding_type == "yarn" and isinstance(config, MambaConfig):
        raise ConfigError(
            "Megatron-LM's hybrids have no --position-embedding-type yarn; use --saver trainyard"
        )
    if not isinstance(config, BertConfig):
        return
    if config.post_layernorm:
        raise ConfigError(
            "Megatron-LM's BERT has no --post-layernorm; use --saver hf, or keep the checkpoint in "
            "our format (--saver trainyard)"
        )
    types = 2 if config.bert_binary_head else 0
    if config.token_types != types:
        raise ConfigError(
            f"--num-tokentypes must be {types} for Megatron-LM's BERT "
            f"{'with' if types else 'without'} a binary head, got {config.token_types}; use "
            "--saver trainyard"
        )


def _refuse_t5(config: T5Config, pp: int) -> None:
    tied = not config.untie_embeddings_and_output_weights
    lacking = {
        "--relu": config.relu,
        "--geglu": config.geglu,
        "--scale-lm-head-input": config.scale_lm_head_input,
        "--no-lm-head-bias": tied and not config.has_output_bias,
        "--group-query-attention": config.query_groups != config.num_attention_heads,
        "--qk-layernorm": config.qk_layernorm,
    }
    if found := [option for option, given in lacking.items() if given]:
        raise ConfigError(
            f"Megatron-LM's T5 has no {', '.join(found)}; use --saver hf, or keep the checkpoint "
            "in our format (--saver trainyard)"
        )
    if config.decoder_layers != config.num_layers:
        raise ConfigError(
            f"Megatron-LM's T5 has as many layers in the decoder ({config.decoder_layers}) as in "
            f"the encoder ({config.num_layers}); use --saver trainyard"
        )
    if pp > 1:
        raise ConfigError(
            f"--target-pipeline-parallel-size {pp}: Megatron-LM's T5 has one pipeline stage; give "
            "1, or leave the option out"
        )


def _sides(window: str | None) -> tuple[int, ...] | None:
    return None if window is None else tuple(int(side) for side in window.strip(" ()").split(","))


def _frequency(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


LEGACY_LACKS: dict[str, Callable[[TransformerConfig], bool]] = {
    "--num-experts": lambda config: config.experts.enabled,
    "--multi-latent-attention": lambda config: config.latent.enabled,
    "--mtp-num-layers": lambda config: config.mtp.mtp_num_layers is not None,
    "--qk-layernorm": lambda config: config.qk_layernorm,
    "--softmax-type": lambda config: config.softmax_type != "vanilla",
    "--window-size": lambda config: config.window_size is not None,
    "--quick-geglu": lambda config: config.quick_geglu,
    "--use-rope-scaling": lambda config: config.use_rope_scaling,
    "Mamba layers": lambda config: isinstance(config, MambaConfig),
    "--position-embedding-type yarn, relative or none": lambda config: (
        config.position_embedding_type in ("yarn", "relative", "none")
    ),
    "--softmax-scale": lambda config: getattr(config, "softmax_scale", None) is not None,
    "T5 with --untie-embeddings-and-output-weights or rope": lambda config: (
        isinstance(config, T5Config)
        and (
            config.untie_embeddings_and_output_weights
            or config.position_embedding_type != "learned_absolute"
        )
    ),
}


def refuse_for_legacy(config: TransformerConfig) -> None:
    """Refuse a model that Megatron-LM's legacy class does not compute."""
    lacking = [option for option, given in LEGACY_LACKS.items() if given(config)]
    if lacking:
        raise ConfigError(
            f"the legacy model class of Megatron-LM has no {', '.join(lacking)}; use --saver core"
        )
