"""Converts params.json, Meta's or Mistral's, to a GPTConfig and back.

Mistral's names head_dim. The file has neither the longest sequence nor the factor by which Llama
3.2 scales wavelengths. Both are inferred from fields in which the versions of Llama differ."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainyard.checkpoint.bounds import check_layers
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.common_options import grouped_queries
from trainyard.conversion.fields import Fields
from trainyard.conversion.huggingface.architecture import LLAMA, MISFITS, MISTRAL
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import LLAMA3_LENGTH, TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.rope_factors import LLAMA3_HIGH_FREQUENCY

log = logging.getLogger(__name__)

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"

MAX_FACTOR = 1e6
"""Largest ffn_dim_multiplier; published ones are below 2."""

DEFAULT_THETA = 10000.0
LLAMA3_THETA, LLAMA_CODE_THETA = 500000.0, 1000000.0
MISTRAL_THETA, MISTRAL_POSITIONS = 1000000.0, 32768
"""Base and longest sequence of a Mistral without a window; earlier ones had a window."""

SMALL = 4096
"""Below this hidden size, Llama 3.2 scales wavelengths by 32; from it on, 3.1 and 3.2 scale them
by 8."""


def read_params(
    document: Any, where: str, specs: Mapping[str, TensorSpec]
) -> tuple[GPTConfig, int]:
    """The model, and the rows of its embedding, which come from the weights if params.json has -1
    or no number."""
    fields = Fields(document, where)
    hidden, heads = fields.need("dim", int), fields.need("n_heads", int)
    if min(hidden, heads) < 1:
        raise ArtifactError(f"{where}: dim {hidden}, n_heads {heads}")
    num_layers = check_layers(fields.need("n_layers", int), where)
    groups = fields.maybe("n_kv_heads", int) or heads
    values = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn_size(fields, hidden, where),
        **grouped_queries(groups, heads),
        **_rotary(fields, hidden),
        **_of_mistral(fields, hidden, heads, where),
        "normalization": "RMSNorm",
        "norm_epsilon": fields.get("norm_eps", 1e-5),
        "swiglu": True,
        "disable_bias_linear": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "untie_embeddings_and_output_weights": OUTPUT in specs,
    }
    fields.raw("max_batch_size")  # a setting of Meta's program, not of the model
    rows = _rows(fields.maybe("vocab_size", int), specs, where)
    fields.refuse_rest([])
    try:
        return GPTConfig(**values), rows
    except ConfigError as error:
        raise ArtifactError(f"{where} describes a model that cannot be built: {error}") from error


def _rotary(fields: Fields, hidden: int) -> dict[str, Any]:
    """Rotary embedding, and the longest sequence."""
    is_mistral = fields.stated("head_dim")
    is_wide = is_mistral and fields.raw("sliding_window") is None
    scaled = fields.get("use_scaled_rope", False)
    theta = fields.get("rope_theta", MISTRAL_THETA if is_wide else DEFAULT_THETA)
    max_seq_len, eps = fields.maybe("max_seq_len", int), fields.get("norm_eps", 1e-5)
    factor = fields.get("rope_scaling_factor", scaling_factor(hidden))
    fields.must_be("rope_high_freq_factor", LLAMA3_HIGH_FREQUENCY)
    if is_mistral:
        positions = MISTRAL_POSITIONS
    elif scaled:
        positions = 131072  # Llama 3.1 and later
    elif theta >= LLAMA3_THETA:
        positions = 16384 if theta >= LLAMA_CODE_THETA else 8192  # Code Llama, Llama 3
    else:
        positions = 2048 if eps < 1e-5 else 4096  # Llama 1, Llama 2
    if scaled:
        log.info("Llama 3 with wavelengths scaled by %s", factor)
    return {
        "seq_length": max_seq_len or positions,
        "max_position_embeddings": max_seq_len or positions,
        "position_embedding_type": "rope",
        "rotary_base": theta,
        **({"use_rope_scaling": True, "rope_scaling_factor": factor} if scaled else {}),
    }


def scaling_factor(hidden: int) -> float:
    """The factor on wavelengths if params.json has none."""
    return 32.0 if hidden < SMALL else 8.0


def _of_mistral(fields: Fields, hidden: int, heads: int, where: str) -> dict[str, Any]:
    """Fields that only Mistral's file has. Its window counts the token itself, ours does not."""
    head_dim, window = fields.maybe("head_dim", int), fields.maybe("sliding_window", int)
    if window is not None and window < 1:
        raise ArtifactError(f"{where}: sliding_window is {window}")
    return {
        "kv_channels": None if head_dim is None or head_dim * heads == hidden else head_dim,
        "window_size": None if window is None else f"{window - 1},0",
    }


def ffn_size(fields: Fields, hidden: int, where: str) -> int:
    """f, the width of the MLP: `hidden_dim`, or 8/3 of h times a factor, rounded up."""
    hidden_dim, factor = fields.maybe("hidden_dim", int), fields.maybe("ffn_dim_multiplier", float)
    multiple_of = fields.get("multiple_of", 256)
    if hidden_dim is not None:
        return hidden_dim
    if multiple_of < 1 or not 0 < (factor or 1.0) < MAX_FACTOR:
        raise ArtifactError(f"{where}: multiple_of {multiple_of}, ffn_dim_multiplier {factor}")
    return rounded_up(hidden, factor, multiple_of)


def rounded_up(hidden: int, factor: float | None, multiple_of: int) -> int:
    """f by the formula of Meta's program."""
    size = int(8 * hidden / 3)
    if factor is not None:
        size = int(factor * size)
    return -(-size // multiple_of) * multiple_of


def _rows(vocab_size: int | None, specs: Mapping[str, TensorSpec], where: str) -> int:
    embedding = specs.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ArtifactError(f"{where}: the files beside it have no {EMBEDDING} with two dims")
    if vocab_size not in (None, -1) and vocab_size < 1:
        raise ArtifactError(f"{where}: vocab_size is {vocab_size}")
    return embedding.shape[0] if vocab_size in (None, -1) else vocab_size


# --- writing ----------------------------------------------------------------------------------


STEPS = (256, 1024, 4096, *(2**power for power in range(14, -1, -1)))
"""Values tried as multiple_of, those of published files first."""

DIGITS = 6
"""Most decimals tried for ffn_dim_multiplier; published ones have one."""


def is_mistral(config: TransformerConfig) -> bool:
    """Whether only Mistral's fields can describe the model."""
    return config.window_size is not None or config.query_size != config.hidden_size


def is_llama3(config: TransformerConfig) -> bool:
    """Whether Llama 3's program would load it. Its ranks shard the embedding by rows; those of
    Llama 1, 2 and Code Llama shard it by columns."""
    return config.use_rope_scaling or LLAMA3_THETA <= config.rotary_base < LLAMA_CODE_THETA


def refuse_for_meta(config: TransformerConfig, num_files: int) -> None:
    """Raise ConfigError for a model that Meta's files cannot hold, or not in `num_files` files."""
    is_windowed = config.window_size is not None
    factor = config.rotary_seq_len_interpolation_factor
    original = config.rope_scaling_original_max_position_embeddings
    rules = {
        f"--model-type {config.model_type}": config.model_type != "gpt",
        "--num-experts": config.experts.enabled,
        "--multi-latent-attention": config.latent.enabled,
        "--mtp-num-layers": config.mtp.mtp_num_layers is not None,
        "--position-embedding-type yarn": config.position_embedding_type == "yarn",
        f"--rotary-seq-len-interpolation-factor {factor}": factor is not None,
        "--use-rope-scaling in a model that only Mistral's params.json describes": (
            is_mistral(config) and config.use_rope_scaling
        ),
        f"--rope-scaling-original-max-position-embeddings {original} (must be {LLAMA3_LENGTH})": (
            config.use_rope_scaling and original != LLAMA3_LENGTH
        ),
    }
    broken = [
        *MISFITS[MISTRAL if is_windowed else LLAMA](config),
        *(text for text, is_broken in rules.items() if is_broken),
    ]
    if broken:
        raise ConfigError(
            "--saver-checkpoint-type meta: Meta's files cannot hold a model with "
            f"{', '.join(broken)}; try --saver hf, or keep --saver trainyard"
        )
    if num_files > 1 and is_mistral(config):
        why = f"--window-size {config.window_size}" if is_windowed else "--kv-channels"
        raise ConfigError(
            f"--target-tensor-parallel-size {num_files}: a model with {why} is written as "
            "Mistral's, whose program reads one file; leave the option out"
        )


# --- params.json --------------------------------------------------------------------------------


def params_document(config: TransformerConfig, rows: int) -> dict[str, Any]:
    """The fields of params.json. rows: of the embedding. Raises ConfigError if no
    ffn_dim_multiplier gives the width of the MLP."""
    common = {
        "dim": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_attention_heads,
        "norm_eps": config.norm_epsilon,
        "vocab_size": rows,
    }
    return common | (_mistral_fields(config) if is_mistral(config) else _llama_fields(config))


def _mistral_fields(config: TransformerConfig) -> dict[str, Any]:
    window = config.attention_window(0)
    fields = {
        "head_dim": config.head_dim,
        "hidden_dim": config.ffn_size,
        "n_kv_heads": config.query_groups,
        "rope_theta": config.rotary_base,
    }
    if window is None or window[0] < 0:
        return fields
    return fields | {"sliding_window": window[0] + 1}  # Mistral's counts the token itself


def _llama_fields(config: TransformerConfig) -> dict[str, Any]:
    fields = ffn_fields(config.hidden_size, config.ffn_size)
    if config.query_groups != config.num_attention_heads:
        fields["n_kv_heads"] = config.query_groups
    if config.rotary_base != DEFAULT_THETA:
        fields["rope_theta"] = config.rotary_base
    if config.use_rope_scaling:
        fields["use_scaled_rope"] = True
        if config.rope_scaling_factor != scaling_factor(config.hidden_size):
            fields["rope_scaling_factor"] = config.rope_scaling_factor
    return fields


def ffn_fields(hidden: int, ffn: int) -> dict[str, Any]:
    """multiple_of, and ffn_dim_multiplier if needed, from which Meta's program computes the width
    `ffn`."""
    ratio = ffn / rounded_up(hidden, None, 1)
    rounded = (round(ratio, digits) for digits in range(1, DIGITS + 1))
    # The last factor lies above the ratio, so that truncation gives ffn.
    factors = [None, *(f for f in rounded if f > 0), ratio * (1 + 0.5 / ffn)]
    for factor in factors:
        for multiple_of in STEPS:
            is_allowed = factor is None or factor < MAX_FACTOR
            if is_allowed and rounded_up(hidden, factor, multiple_of) == ffn:
                multiplier = {} if factor is None else {"ffn_dim_multiplier": factor}
                return {"multiple_of": multiple_of, **multiplier}
    raise ConfigError(
        f"--saver-checkpoint-type meta: Meta's params.json cannot describe --ffn-hidden-size {ffn} "
        f"with --hidden-size {hidden}: no ffn_dim_multiplier below {MAX_FACTOR:.0e} gives it; use "
        "--saver hf"
    )
