"""The classes of `transformers` that compute what our Mamba-2 and hybrids do, their config.json and
names: Mamba2ForCausalLM with Mamba-2 layers alone, NemotronHForCausalLM with attention and MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainyard.artifacts.strict_json import INFINITY
from trainyard.checkpoint.bounds import check_layers
from trainyard.conversion.common_options import TANH_GELU, grouped_queries
from trainyard.conversion.fields import Fields
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.checkpoint_names import Part
from trainyard.models.mamba import checkpoint_names as names
from trainyard.models.mamba.config import CONV_WIDTH, MambaConfig
from trainyard.models.mamba.pattern import ATTENTION, EXPERTS, MAMBA, MLP

MAMBA2, NEMOTRON_H = "Mamba2ForCausalLM", "NemotronHForCausalLM"
MAMBAS = (MAMBA2, NEMOTRON_H)
MODEL_TYPES = {"mamba2": (MAMBA2,), "nemotron_h": (NEMOTRON_H,)}

ACTIVATIONS = {"squared_relu": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Of our MLP, and theirs."""

LETTERS = {
    **{"linear_attention": MAMBA, "mamba": MAMBA},
    **{"full_attention": ATTENTION, "attention": ATTENTION},
    **{"mlp": MLP, "moe": EXPERTS},
}
"""Ours, by the names in `layers_block_type` of newer and older files."""

LENGTH = 2048
"""Tokens of a sample of the published Mamba-2, whose files have no length."""

SHORTEST = 1e-12
"""A limit of time steps that no softplus in fp32 falls below, for a class whose limit is also the
argument of a logarithm and so not 0."""

HARMLESS = (
    *("rescale_prenorm_residual", "time_step_rank", "time_step_max", "time_step_floor", "rms_norm"),
    *("mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "expand"),
    *("norm_before_gate", "num_query_groups", "auto_map"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("sliding_window", "attention_bias", "mamba_proj_bias", "rope_theta", "partial_rotary_factor"),
    *("moe_shared_expert_overlap", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "num_experts_per_tok", "routed_scaling_factor"),
    *("n_group", "topk_group", "norm_topk_prob"),
)
"""Fields that follow from others, belong to experts, or that their classes do not look at."""


# --- which class ------------------------------------------------------------------------------


def mamba_architecture(config: MambaConfig) -> str:
    """The class that computes the same; ConfigError says why none does."""
    misfits = {MAMBA2: _mamba2_misfits(config), NEMOTRON_H: _nemotron_misfits(config)}
    for name, broken in misfits.items():
        if not broken:
            return name
    reasons = "; ".join(f"{name}: {', '.join(broken)}" for name, broken in misfits.items())
    raise ConfigError(
        "--saver hf: no Hugging Face architecture fits this model. Options that each cannot have: "
        f"{reasons}. Keep the checkpoint in our format (--saver trainyard)"
    )


def _common_misfits(config: MambaConfig) -> dict[str, bool]:
    return {
        f"--position-embedding-type {config.position_embedding_type} (must be none)": (
            config.position_embedding_type != "none"
        ),
        f"--normalization {config.normalization} (must be RMSNorm)": (
            config.normalization != "RMSNorm"
        ),
        "--apply-layernorm-1p": config.apply_layernorm_1p,
    }


def _mamba2_misfits(config: MambaConfig) -> list[str]:
    rules = {
        **_common_misfits(config),
        f"layers {config.layer_kinds} (all must be {MAMBA})": set(config.layer_kinds) != {MAMBA},
        f"{config.inner_size} channels of all heads (a multiple of --hidden-size)": (
            config.inner_size % config.hidden_size != 0
        ),
    }
    return [text for text, broken in rules.items() if broken]


def _nemotron_misfits(config: MambaConfig) -> list[str]:
    rules = {
        **_common_misfits(config),
        f"{EXPERTS} in the layers {config.layer_kinds}": EXPERTS in config.layer_kinds,
        "no --disable-bias-linear": config.linear_bias,
        "--add-qkv-bias": config.add_qkv_bias,
        "--qk-layernorm": config.qk_layernorm,
        "--window-size": config.window_size is not None,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
        f"an activation other than {', '.join(ACTIVATIONS)}": config.activation not in ACTIVATIONS,
        "no --untie-embeddings-and-output-weights": not config.untie_embeddings_and_output_weights,
        "--mamba-dt-max": config.mamba_dt_max is not None,
    }
    return [text for text, broken in rules.items() if broken]


# --- config.json ------------------------------------------------------------------------------


def mamba_document(config: MambaConfig, name: str) -> dict[str, Any]:
    """The fields of config.json that are the class's own."""
    common = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_norm_epsilon": config.norm_epsilon,
        "n_groups": config.mamba_num_groups,
        "conv_kernel": CONV_WIDTH,
        "use_bias": False,
        "use_conv_bias": True,
        "chunk_size": config.mamba_chunk_size,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }
    if name == MAMBA2:
        longest = config.mamba_dt_max
        return common | {
            "model_type": "mamba2",
            "num_heads": config.mamba_heads,
            "head_dim": config.mamba_head_dim,
            "state_size": config.mamba_state_dim,
            "expand": config.inner_size // config.hidden_size,
            "hidden_act": "silu",
            "residual_in_fp32": config.fp32_residual_connection,
            "time_step_limit": [config.mamba_dt_min, INFINITY if longest is None else longest],
        }
    return common | {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": config.layer_kinds,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.positions,
        "intermediate_size": config.ffn_size,
        "mlp_hidden_act": ACTIVATIONS[config.activation],
        "mlp_bias": False,
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": config.hidden_dropout,
        "mamba_num_heads": config.mamba_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "ssm_state_size": config.mamba_state_dim,
        "residual_in_fp32": config.fp32_residual_connection,
        "time_step_min": max(config.mamba_dt_min, SHORTEST),
    }


def mamba_values(fields: Fields, name: str, where: str) -> dict[str, Any]:
    """Options of a MambaConfig."""
    for field, value in {
        "use_bias": False,
        "use_conv_bias": True,
        "conv_kernel": CONV_WIDTH,
    }.items():
        fields.must_be(field, value)
    common = {
        "hidden_size": fields.get("hidden_size", 4096),
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "mamba_num_groups": fields.get("n_groups", 8),
        "mamba_chunk_size": fields.get("chunk_size", 256 if name == MAMBA2 else 128),
        "normalization": "RMSNorm",
        "position_embedding_type": "none",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", False),
    }
    own = _mamba2_values(fields, where) if name == MAMBA2 else _nemotron_values(fields, where)
    return common | own


def _mamba2_values(fields: Fields, where: str) -> dict[str, Any]:
    fields.must_be("hidden_act", "silu", "swish")
    heads, channels = fields.get("num_heads", 128), fields.get("head_dim", 64)
    least, most = _limits(fields, where)
    return {
        "num_layers": fields.get("num_hidden_layers", 64),
        "hybrid_layer_pattern": None,
        "num_attention_heads": heads,  # which no layer has
        "kv_channels": channels,
        "seq_length": LENGTH,
        "mamba_num_heads": heads,
        "mamba_head_dim": channels,
        "mamba_state_dim": fields.get("state_size", 128),
        "mamba_dt_min": least,
        "mamba_dt_max": most,
        "fp32_residual_connection": fields.get("residual_in_fp32", True),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _limits(fields: Fields, where: str) -> tuple[float, float | None]:
    """--mamba-dt-min and --mamba-dt-max."""
    fields.raw("time_step_min")  # of initial values alone
    given = fields.raw("time_step_limit")
    if given is None:
        return 0.0, None
    if isinstance(given, list) and len(given) == 2:
        least, most = given
        is_open = most == INFINITY
        if type(least) in (int, float) and (is_open or type(most) in (int, float)):
            return float(least), None if is_open else float(most)
    raise ArtifactError(f"{where}: time_step_limit is {given!r:.60}, wanted two numbers")


def _nemotron_values(fields: Fields, where: str) -> dict[str, Any]:
    fields.must_be("mlp_bias", False)
    fields.must_be("mamba_hidden_act", "silu", "swish")
    fields.must_be("mlp_hidden_act", *ACTIVATIONS.values(), *TANH_GELU)
    fields.must_be("moe_latent_size", None)
    kinds = _letters(fields, where)
    heads = fields.get("num_attention_heads", 32)
    keys = fields.get("num_key_value_heads", 8)
    older = fields.maybe("attention_head_dim", int)
    positions = fields.get("max_position_embeddings", 4096)
    activation = fields.get("mlp_hidden_act", "relu2")
    shortest = fields.get("time_step_min", 1e-3)
    fields.raw("time_step_limit")  # which its class does not look at
    return {
        "num_layers": len(kinds),
        "hybrid_layer_pattern": kinds,
        "num_attention_heads": heads,
        "kv_channels": fields.maybe("head_dim", int) or older or 128,
        **grouped_queries(keys, heads),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "ffn_hidden_size": fields.get("intermediate_size", 21504),
        "squared_relu": activation == "relu2",
        "openai_gelu": activation in TANH_GELU,
        "mamba_num_heads": fields.get("mamba_num_heads", 128),
        "mamba_head_dim": fields.get("mamba_head_dim", 64),
        "mamba_state_dim": fields.get("ssm_state_size", 128),
        "mamba_dt_min": 0.0 if shortest <= SHORTEST else shortest,
        "fp32_residual_connection": fields.get("residual_in_fp32", False),
        "hidden_dropout": fields.get("hidden_dropout", 0.0),
        "attention_dropout": fields.get("attention_dropout", 0.0),
    }


def _letters(fields: Fields, where: str) -> str:
    """The pattern of older files, or the list of newer ones."""
    pattern, count = fields.maybe("hybrid_override_pattern", str), fields.raw("num_hidden_layers")
    listed = [fields.raw(name) for name in ("layers_block_type", "layer_types")]
    kinds = next((kinds for kinds in listed if kinds is not None), None)
    if kinds is not None:
        if not isinstance(kinds, list) or any(
            not isinstance(kind, str) or kind not in LETTERS for kind in kinds
        ):
            raise ArtifactError(
                f"{where}: layers_block_type is {kinds!r:.60}, wanted a list of "
                f"{', '.join(LETTERS)}"
            )
        pattern = "".join(LETTERS[kind] for kind in kinds)
    if not pattern:
        raise ArtifactError(f"{where}: has neither hybrid_override_pattern nor layers_block_type")
    check_layers(len(pattern), where)
    if count not in (None, len(pattern)):
        raise ArtifactError(
            f"{where}: num_hidden_layers is {count!r:.20}, and the layers are {len(pattern)}"
        )
    if EXPERTS in pattern:
        raise ConfigError(
            f"{where}: its layers {pattern:.60} have experts; this version reads hybrids with "
            "dense MLPs only"
        )
    return pattern


# --- names ------------------------------------------------------------------------------------


def mamba_names(config: MambaConfig) -> Iterator[tuple[str, str, Part]]:
    """(their name, ours, part) of every tensor."""
    yield names.EMBEDDING_ROW
    for layer, letter in enumerate(config.layer_kinds):
        for theirs, ours, part in names.OF_LETTER[letter]:
            yield f"{names.PREFIX}layers.{layer}.{theirs}", f"decoder.layers.{layer}.{ours}", part
    yield names.FINAL_ROW
    if config.untie_embeddings_and_output_weights:
        yield names.OUTPUT_ROW
