"""Names of a Retro's parameters in Megatron-LM's checkpoints. Data only: `conversion` applies it.

Ours are those of Megatron core's RetroModel with its local layers."""

from __future__ import annotations

SIGN = ".cross_attention.attn."
"""Part of names that only a Retro has."""

ENCODER = "cross_attention.encoder.layers."
"""Below a layer of the decoder; a number and the names of a layer follow."""

NEIGHBOR_NORM = "pre_mlp_layernorm.norm."
"""Of the first layer of the encoder, which Transformer Engine's keeps apart too."""

WITH_EXTRA_STATE = (
    *(".cross_attention.attn.linear_q", ".cross_attention.attn.linear_kv"),
    *(".cross_attention.attn.linear_proj", ".pre_mlp_layernorm.norm"),
)
"""Ends of names of modules that keep an `_extra_state` in sharded checkpoints, in addition to
those of a GPT."""
