"""Rotary embedding as a config.json tells it, in the options of ours.

Two spellings: `rope_theta` with `rope_scaling` ({"type" or "rope_type": ...}), and since
transformers 5 `rope_parameters` with both in it. A file may have both, if they agree."""

from __future__ import annotations

import math
from typing import Any

from trainyard.conversion.fields import Fields
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.rope import LLAMA3_HIGH_FREQUENCY, LLAMA3_LOW_FREQUENCY

DEFAULT_THETA = 10000.0


def read_rope(fields: Fields, positions: int, where: str) -> dict[str, Any]:
    """Options of a GPTConfig. positions: of the model, the original length where none is given."""
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
        values |= _yarn(rope, positions, where)
    elif kind != "default":
        raise ConfigError(
            f"{where}: rotary embedding of type {kind}; this version reads default, linear, "
            "llama3, yarn"
        )
    # a plain one may still carry what a scaled one would need
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
                    f"{where}: says {key} {merged[key]!r:.40} and {value!r:.40} of the rotary "
                    "embedding; make rope_theta, rope_parameters and rope_scaling agree"
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


def _yarn(rope: Fields, positions: int, where: str) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings", positions)
    if min(original, positions) < 1:
        raise ArtifactError(f"{where}: positions {positions}, before they were scaled {original}")
    factor = rope.maybe("factor", float) or positions / original
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": rope.maybe("beta_fast", float) or 32.0,
        "yarn_beta_slow": rope.maybe("beta_slow", float) or 1.0,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
        **_yarn_gain(rope, factor, where),
    }


def _yarn_gain(rope: Fields, factor: float, where: str) -> dict[str, float]:
    """The factor on queries and keys: given as it is, by two scales, or by the stretch alone."""
    gain = rope.maybe("attention_factor", float)
    scale, divided = rope.maybe("mscale", float), rope.maybe("mscale_all_dim", float)
    if gain is None:
        return {"yarn_mscale": scale, "yarn_mscale_all_dim": divided} if scale and divided else {}
    growth = 0.1 * math.log(max(factor, 1.0))
    if gain == growth + 1.0:
        return {}
    if not growth:
        raise ConfigError(
            f"{where}: rope_parameters.attention_factor is {gain} with factor {factor}, and ours "
            "grows with the logarithm of the factor alone"
        )
    return {"yarn_mscale": (gain - 1.0) / growth, "yarn_mscale_all_dim": 0.0}
