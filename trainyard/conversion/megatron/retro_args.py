"""Converts Megatron-LM's arguments of a Retro to our options, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.models.retro.config import RetroConfig

SAME_NAME = (
    *("retro_chunk_length", "retro_num_neighbors", "retro_num_retrieved_chunks"),
    *("retro_encoder_layers", "retro_encoder_hidden_dropout", "retro_encoder_attention_dropout"),
)
"""Fields of RetroConfig that are arguments of the same name and meaning. Its --retro-attention-gate
is an argument too, but Megatron core does not read it."""

DROPOUTS = ("retro_encoder_hidden_dropout", "retro_encoder_attention_dropout")

ADDED = "retro_add_retriever"


def retro_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a RetroConfig."""
    names = (*SAME_NAME, "retro_no_final_layernorm")  # which the reader adds
    found = {name: args[name] for name in names if args.get(name) is not None}
    for name in DROPOUTS:
        if type(found.get(name)) is int:
            found[name] = float(found[name])
    return {"model_type": "retro", **found}


def retro_args(config: RetroConfig) -> dict[str, Any]:
    """The arguments of a Retro."""
    return {
        **{name: getattr(config, name) for name in SAME_NAME},
        "retro_encoder_num_layers": config.retro_encoder_layers,
        "retro_retrieved_length": config.retrieved_length,
        "retro_attention_gate": config.retro_attention_gate,
        ADDED: True,
    }
