"""Meta's params.json of a GPTConfig, and what the layout cannot hold.

    Llama    dim n_layers n_heads norm_eps vocab_size multiple_of
             where they are not the defaults: n_kv_heads ffn_dim_multiplier rope_theta
             use_scaled_rope rope_scaling_factor
    Mistral  dim n_layers head_dim hidden_dim n_heads n_kv_heads norm_eps vocab_size rope_theta
             sliding_window where there is one

Mistral's is written for what Llama's cannot say: a window, or heads whose widths do not sum to dim.
The programs of both take each field as an argument and fail over one that they do not know, so no
others are written; the longest sequence is among those that they want from their caller."""

from __future__ import annotations

from typing import Any

from trainyard.conversion.huggingface.config import LLAMA, MISFITS, MISTRAL
from trainyard.conversion.meta.params import (
    DEFAULT_THETA,
    LLAMA3_THETA,
    LLAMA_CODE_THETA,
    MAX_FACTOR,
    rounded_up,
    scaling_factor,
)
from trainyard.errors import ConfigError
from trainyard.models.config import LLAMA3_LENGTH
from trainyard.models.gpt.config import GPTConfig

STEPS = (256, 1024, 4096, *(2**power for power in range(14, -1, -1)))
"""Tried as multiple_of, those of published files first."""

DIGITS = 6
"""Of ffn_dim_multiplier; published ones have one."""


def is_mistral(config: GPTConfig) -> bool:
    """Whether only Mistral's fields describe it."""
    return config.window_size is not None or config.query_size != config.hidden_size


def is_llama3(config: GPTConfig) -> bool:
    """Whether the program for it would be that of Llama 3, whose ranks share out the rows of the
    embedding; those of Llama 1, 2 and Code Llama share out its columns."""
    return config.use_rope_scaling or LLAMA3_THETA <= config.rotary_base < LLAMA_CODE_THETA


def refuse_for_meta(config: GPTConfig, num_files: int) -> None:
    """ConfigError, in words, for a model that these files do not hold, or not as so many."""
    is_windowed = config.window_size is not None
    factor = config.rotary_seq_len_interpolation_factor
    original = config.rope_scaling_original_max_position_embeddings
    rules = {
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
            "--saver-checkpoint-type meta: Meta's files cannot hold this model; in the way stand "
            f"{', '.join(broken)}. --saver hf may hold it, --saver trainyard does"
        )
    if num_files > 1 and is_mistral(config):
        why = f"--window-size {config.window_size}" if is_windowed else "heads of its own width"
        raise ConfigError(
            f"--target-tensor-parallel-size {num_files}: a model with {why} is written as "
            "Mistral's, whose program reads one file; leave the option out"
        )


# --- params.json --------------------------------------------------------------------------------


def params_document(config: GPTConfig, rows: int) -> dict[str, Any]:
    """The fields. rows: of the embedding. Raises ConfigError where no factor gives the width of the
    MLP."""
    common = {
        "dim": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_attention_heads,
        "norm_eps": config.norm_epsilon,
        "vocab_size": rows,
    }
    return common | (_of_mistral(config) if is_mistral(config) else _of_llama(config))


def _of_mistral(config: GPTConfig) -> dict[str, Any]:
    window = config.attention_window(0)
    fields = {
        "head_dim": config.head_dim,
        "hidden_dim": config.ffn_size,
        "n_kv_heads": config.query_groups,
        "rope_theta": config.rotary_base,
    }
    if window is None or window[0] < 0:
        return fields
    return fields | {"sliding_window": window[0] + 1}  # theirs counts the token itself


def _of_llama(config: GPTConfig) -> dict[str, Any]:
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
    """multiple_of, and ffn_dim_multiplier if there must be one, by which Meta's program finds the
    width `ffn`."""
    ratio = ffn / rounded_up(hidden, None, 1)
    rounded = (round(ratio, digits) for digits in range(1, DIGITS + 1))
    # the last is cut down to ffn whatever the rounding of the product
    factors = [None, *(f for f in rounded if f > 0), ratio * (1 + 0.5 / ffn)]
    for factor in factors:
        for multiple_of in STEPS:
            usual = factor is None or factor < MAX_FACTOR
            if usual and rounded_up(hidden, factor, multiple_of) == ffn:
                told = {} if factor is None else {"ffn_dim_multiplier": factor}
                return {"multiple_of": multiple_of, **told}
    raise ConfigError(
        f"--saver-checkpoint-type meta: --ffn-hidden-size {ffn} does not follow from --hidden-size "
        f"{hidden} by any ffn_dim_multiplier below {MAX_FACTOR:.0e}, and Meta's params.json cannot "
        "say it otherwise; --saver hf writes it"
    )
