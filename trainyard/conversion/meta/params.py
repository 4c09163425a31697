"""The GPTConfig of Meta's params.json, or of Mistral's, which names head_dim.

It does not tell the longest sequence, nor by how much Llama 3.2 scales wavelengths: both follow
from what the versions of Llama differ in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainyard.checkpoint.bounds import check_layers
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.fields import Fields
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.rope import LLAMA3_HIGH_FREQUENCY

log = logging.getLogger(__name__)

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"

MAX_FACTOR = 1e6
"""Of the width of the MLP; published ones are below 2."""

DEFAULT_THETA = 10000.0
LLAMA3_THETA, LLAMA_CODE_THETA = 500000.0, 1000000.0
MISTRAL_THETA, MISTRAL_POSITIONS = 1000000.0, 32768
"""Of a Mistral without a window; those before had one."""

SMALL = 4096
"""Llama 3.2 of a smaller width scales wavelengths by 32; 3.1 and 3.2 of this width and above by
8."""


def read_params(
    document: Any, where: str, specs: Mapping[str, TensorSpec]
) -> tuple[GPTConfig, int]:
    """The model, and the rows of its embedding: where params.json says -1 or nothing, the weights
    decide."""
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
        **({"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}),
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
    fields.raw("max_batch_size")  # of a run, not of the model
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
    told, eps = fields.maybe("max_seq_len", int), fields.get("norm_eps", 1e-5)
    factor = fields.get("rope_scaling_factor", scaling_factor(hidden))
    fields.must_be("rope_high_freq_factor", LLAMA3_HIGH_FREQUENCY)
    if is_mistral:
        positions = MISTRAL_POSITIONS
    elif scaled:
        positions = 131072  # 3.1 and later
    elif theta >= LLAMA3_THETA:
        positions = 16384 if theta >= LLAMA_CODE_THETA else 8192  # Code Llama, 3
    else:
        positions = 2048 if eps < 1e-5 else 4096  # 1, 2
    if scaled:
        log.info("Llama 3 with wavelengths scaled by %s", factor)
    return {
        "seq_length": told or positions,
        "max_position_embeddings": told or positions,
        "position_embedding_type": "rope",
        "rotary_base": theta,
        **({"use_rope_scaling": True, "rope_scaling_factor": factor} if scaled else {}),
    }


def scaling_factor(hidden: int) -> float:
    """By how much wavelengths are scaled where nothing says it."""
    return 32.0 if hidden < SMALL else 8.0


def _of_mistral(fields: Fields, hidden: int, heads: int, where: str) -> dict[str, Any]:
    """What Mistral's file says beside Llama's fields; its window counts the token itself."""
    head_dim, window = fields.maybe("head_dim", int), fields.maybe("sliding_window", int)
    if window is not None and window < 1:
        raise ArtifactError(f"{where}: sliding_window is {window}")
    return {
        "kv_channels": None if head_dim is None or head_dim * heads == hidden else head_dim,
        "window_size": None if window is None else f"{window - 1},0",
    }


def ffn_size(fields: Fields, hidden: int, where: str) -> int:
    """f: 8/3 of h, times a factor, rounded up; or as it is told."""
    told, factor = fields.maybe("hidden_dim", int), fields.maybe("ffn_dim_multiplier", float)
    multiple_of = fields.get("multiple_of", 256)
    if told is not None:
        return told
    if multiple_of < 1 or not 0 < (factor or 1.0) < MAX_FACTOR:
        raise ArtifactError(f"{where}: multiple_of {multiple_of}, ffn_dim_multiplier {factor}")
    return rounded_up(hidden, factor, multiple_of)


def rounded_up(hidden: int, factor: float | None, multiple_of: int) -> int:
    """The formula of Meta's program."""
    size = int(8 * hidden / 3)
    if factor is not None:
        size = int(factor * size)
    return -(-size // multiple_of) * multiple_of


def _rows(told: int | None, specs: Mapping[str, TensorSpec], where: str) -> int:
    embedding = specs.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ArtifactError(f"{where}: there is no {EMBEDDING} beside it")
    if told not in (None, -1) and told < 1:
        raise ArtifactError(f"{where}: vocab_size is {told}")
    return embedding.shape[0] if told in (None, -1) else told
