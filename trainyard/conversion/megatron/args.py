"""Converts the `args` of a Megatron-LM checkpoint to our options; `written_args` has the way back.

Every argument that changes what the model computes is read or refused by name. Arguments that only
concern training or speed are ignored. Names are the parser's destinations, of all releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.artifacts.strict_json import shown
from trainyard.checkpoint.bounds import check_layers
from trainyard.config import from_dict
from trainyard.conversion.megatron.expert_args import MAX_PATTERN, experts_of
from trainyard.conversion.megatron.latent_args import latents_of
from trainyard.conversion.megatron.mamba_args import OF_HYBRIDS, hybrid_values
from trainyard.conversion.megatron.retro_args import ADDED, retro_values
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.retro.config import RetroConfig
from trainyard.models.t5.config import T5Config

SAME_NAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
    *("group_query_attention", "seq_length", "make_vocab_size_divisible_by"),
    *("max_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast"),
    *("yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim"),
    *("yarn_correction_range_round_to_int", "normalization", "norm_epsilon"),
    *("apply_layernorm_1p", "fp32_residual_connection", "hidden_dropout", "attention_dropout"),
    *("add_qkv_bias", "qk_layernorm", "qk_l2_norm", "softmax_type"),
    *("apply_query_key_layer_scaling", "swiglu", "quick_geglu", "squared_relu", "openai_gelu"),
    *("bias_gelu_fusion", "untie_embeddings_and_output_weights", "init_method_std"),
    *("embedding_init_method_std", "init_method_xavier_uniform", "attention_softmax_in_fp32"),
)
"""Fields of TransformerConfig that are arguments of the same name and meaning."""

FLOATS = (
    *("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "norm_epsilon"),
    *("rope_scaling_factor", "hidden_dropout", "attention_dropout", "init_method_std"),
    *("yarn_rotary_scaling_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale"),
    *("yarn_mscale_all_dim", "embedding_init_method_std"),
)

REFUSED: dict[str, tuple[Any, ...]] = {
    "moe_latent_size": (None, 0),
    "moe_use_legacy_grouped_gemm": (None, False),
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
        if args.get("model_type") == "retro":
            return from_dict(RetroConfig, values | retro_values(args), "args")
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
    own = {"mamba": OF_HYBRIDS, "retro": (ADDED,)}.get(str(args.get("model_type")), ())
    found = [
        f"{name} ({args[name]!r:.40})"
        for name, harmless in REFUSED.items()
        if name in args and args[name] not in harmless and name not in own
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
