"""Rotary embeddings in a config.json of `transformers`, both ways."""

from __future__ import annotations

import math
from typing import Any

from trainyard.conversion.fields import Fields
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.rope_factors import LLAMA3_HIGH_FREQUENCY, LLAMA3_LOW_FREQUENCY, yarn_gain

DEFAULT_THETA = 10000.0


def read_rope(
    fields: Fields, positions: int, where: str, *, latents: bool = False
) -> dict[str, Any]:
    """The options of a GPTConfig for rotary embedding.

    positions: of the model; the original length before scaling if the file has none. latents: of
    multi-latent attention, whose scores grow by `mscale_all_dim`."""
    rope = Fields(_merged(fields, where), where, "rope_parameters.")
    fields.must_be("partial_rotary_factor", 1.0)
    rope.must_be("partial_rotary_factor", 1.0)
    values: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", DEFAULT_THETA),
    }
    kind = _kind(rope, where)
    if kind == "linear":
        values["rotary_seq_len_interpolation_factor"] = rope.need("factor", float)
    elif kind == "llama3":
        values |= _llama3(rope, positions)
    elif kind == "yarn":
        values |= _yarn(rope, positions, where, latents)
    elif kind != "default":
        raise ConfigError(
            f"{where}: rotary embedding of type {kind}; this version reads only default, linear, "
            "llama3, yarn"
        )
    # Files without scaling may still have the fields that scaling needs.
    rope.refuse_rest(["original_max_position_embeddings", "factor"] if kind == "default" else [])
    return values


def _merged(fields: Fields, where: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    theta = fields.maybe("rope_theta", float)
    parts = [fields.raw("rope_parameters"), fields.raw("rope_scaling")]
    for part in [{} if theta is None else {"rope_theta": theta}, *parts]:
        if part is not None and not isinstance(part, dict):
            raise ArtifactError(f"{where}: rope_parameters is {part!r:.60}, wanted a table")
        for key, value in (part or {}).items():
            if value is None:
                continue
            if merged.setdefault(key, value) != value:
                raise ArtifactError(
                    f"{where}: {key} of the rotary embedding is {merged[key]!r:.40} and "
                    f"{value!r:.40}; make rope_theta, rope_parameters and rope_scaling agree"
                )
    return merged


def _kind(rope: Fields, where: str) -> str:
    kinds = {rope.maybe("rope_type", str), rope.maybe("type", str)} - {None}
    if len(kinds) > 1:
        raise ArtifactError(f"{where}: rope_type and type of the rotary embedding differ")
    return kinds.pop() or "default" if kinds else "default"


def _llama3(rope: Fields, positions: int) -> dict[str, Any]:
    rope.must_be("low_freq_factor", LLAMA3_LOW_FREQUENCY)
    rope.must_be("high_freq_factor", LLAMA3_HIGH_FREQUENCY)
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": rope.need("factor", float),
        "rope_scaling_original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", positions
        ),
    }


def _yarn(rope: Fields, positions: int, where: str, latents: bool) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings", positions)
    if min(original, positions) < 1:
        raise ArtifactError(
            f"{where}: positions must be positive, got {positions}, before scaling {original}"
        )
    factor = rope.maybe("factor", float) or positions / original
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": rope.maybe("beta_fast", float) or 32.0,
        "yarn_beta_slow": rope.maybe("beta_slow", float) or 1.0,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
        **(_yarn_growths(rope, factor) if latents else _yarn_gain(rope, factor, where)),
    }


def _yarn_gain(rope: Fields, factor: float, where: str) -> dict[str, float]:
    """YaRN's factor on queries and keys: `attention_factor`, two scales, or from `factor` alone."""
    gain = rope.maybe("attention_factor", float)
    scale, divided = rope.maybe("mscale", float), rope.maybe("mscale_all_dim", float)
    if gain is None:
        return {"yarn_mscale": scale, "yarn_mscale_all_dim": divided} if scale and divided else {}
    growth = 0.1 * math.log(max(factor, 1.0))
    if gain == growth + 1.0:
        return {}
    if not growth:
        raise ConfigError(
            f"{where}: rope_parameters.attention_factor must be 1.0 with factor {factor}, got "
            f"{gain}; this version computes it from the logarithm of factor"
        )
    return {"yarn_mscale": (gain - 1.0) / growth, "yarn_mscale_all_dim": 0.0}


def _yarn_growths(rope: Fields, factor: float) -> dict[str, float]:
    """The two scales where `mscale_all_dim` counts for itself as well."""
    gain, growth = rope.maybe("attention_factor", float), 0.1 * math.log(max(factor, 1.0))
    scale, divided = rope.maybe("mscale", float), rope.get("mscale_all_dim", 0.0)
    if gain is None and scale and divided:
        return {"yarn_mscale": scale, "yarn_mscale_all_dim": divided}
    gain = growth + 1.0 if gain is None else gain
    whole = gain * (divided * growth + 1.0)  # as of one scale
    if whole == growth + 1.0 or not growth:
        return {"yarn_mscale": 1.0, "yarn_mscale_all_dim": divided}
    return {"yarn_mscale": (whole - 1.0) / growth, "yarn_mscale_all_dim": divided}


# --- ours to theirs ---------------------------------------------------------------------------


def rope_parameters(config: TransformerConfig) -> dict[str, Any]:
    """The field `rope_parameters`."""
    theta = {"rope_theta": config.rotary_base}
    if config.use_rope_scaling:
        return theta | {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": LLAMA3_LOW_FREQUENCY,
            "high_freq_factor": LLAMA3_HIGH_FREQUENCY,
            "original_max_position_embeddings": (
                config.rope_scaling_original_max_position_embeddings
            ),
        }
    if config.latent.enabled and config.yarn_rotary_scaling_factor == 1.0:
        return theta | {"rope_type": "default"}
    if config.stretched_by_yarn:
        growths: dict[str, float] = {"attention_factor": yarn_gain(config)}
        if config.latent.enabled:
            growths = _written_growths(config)
        return theta | {
            "rope_type": "yarn",
            "factor": config.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "truncate": config.yarn_correction_range_round_to_int,
            **growths,
        }
    factor = config.rotary_seq_len_interpolation_factor
    if factor is not None:
        return theta | {"rope_type": "linear", "factor": factor}
    return theta | {"rope_type": "default"}


def _written_growths(config: TransformerConfig) -> dict[str, float]:
    """The two scales where both count; `transformers` ignores `mscale` beside a 0."""
    scale, divided = config.yarn_mscale, config.yarn_mscale_all_dim
    if scale and divided:
        return {"mscale": scale, "mscale_all_dim": divided}
    return {"attention_factor": yarn_gain(config), "mscale_all_dim": divided}
