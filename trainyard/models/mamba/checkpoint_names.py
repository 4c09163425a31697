"""Names of the parameters of a Mamba-2 or a hybrid in the checkpoints of others. Data only:
`conversion` applies it. Tables have rows as those of `gpt.checkpoint_names`."""

from __future__ import annotations

from trainyard.models.gpt.checkpoint_names import EMBEDDING, OUTPUT, Names, Part
from trainyard.models.mamba.pattern import ATTENTION, MAMBA, MLP

# --- Megatron-LM ------------------------------------------------------------------------------

SIGN = ".mixer."
"""Part of names that only a Mamba layer has."""

ENGINE = {"mixer.in_proj.layer_norm_": "pre_mixer_layernorm."}
"""The norm of a Mamba layer, which files keep inside the matrix that follows it, as those of
Transformer Engine's layers: prefixes of names, and ours."""

FINAL_NORM, THEIR_FINAL_NORM = "decoder.final_layernorm.", "decoder.final_norm."
"""Ours, and that of a hybrid."""

_PARTS = {
    "mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    "mixer.conv1d.weight": ("x", "B", "C"),
    "mixer.conv1d.bias": ("x", "B", "C"),
}
"""Tensors that `torch_dist` has in parts, with the letters of the parts, in the order of rows."""


def letters_of(name: str) -> tuple[str, ...]:
    """The letters of the parts of a tensor; none if it is whole."""
    return next((letters for end, letters in _PARTS.items() if name.endswith(f".{end}")), ())


def part_of(key: str) -> tuple[str, int]:
    """The name of the whole tensor, and the number of the part of it that a key is."""
    whole, _, letter = key.rpartition(".")
    letters = letters_of(whole)
    return (whole, letters.index(letter)) if letter in letters else (key, 0)


WITH_EXTRA_STATE = ("output_layer",)
"""Modules outside the layers, beside the final norm, that keep an `_extra_state` in Megatron core's
sharded checkpoints, with a weight of their own or without."""

# --- Hugging Face, in the order of its files --------------------------------------------------

PREFIX, NEWER_PREFIX = "backbone.", "model."
"""Of names in published files; Nemotron-H also has the second."""

EMBEDDING_ROW: tuple[str, str, Part] = (f"{PREFIX}embeddings.weight", EMBEDDING, "whole")
FINAL_ROW: tuple[str, str, Part] = (f"{PREFIX}norm_f.weight", f"{FINAL_NORM}weight", "whole")
OUTPUT_ROW: tuple[str, str, Part] = ("lm_head.weight", OUTPUT, "whole")

OF_LETTER: dict[str, Names] = {
    MAMBA: (
        ("norm.weight", "pre_mixer_layernorm.weight", "whole"),
        ("mixer.dt_bias", "mixer.dt_bias", "whole"),
        ("mixer.A_log", "mixer.A_log", "whole"),
        ("mixer.D", "mixer.D", "whole"),
        ("mixer.conv1d.weight", "mixer.conv1d.weight", "whole"),
        ("mixer.conv1d.bias", "mixer.conv1d.bias", "whole"),
        ("mixer.in_proj.weight", "mixer.in_proj.weight", "whole"),
        ("mixer.norm.weight", "mixer.norm.weight", "whole"),
        ("mixer.out_proj.weight", "mixer.out_proj.weight", "whole"),
    ),
    ATTENTION: (
        ("norm.weight", "input_layernorm.weight", "whole"),
        ("mixer.q_proj.weight", "self_attention.linear_qkv.weight", "q"),
        ("mixer.k_proj.weight", "self_attention.linear_qkv.weight", "k"),
        ("mixer.v_proj.weight", "self_attention.linear_qkv.weight", "v"),
        ("mixer.o_proj.weight", "self_attention.linear_proj.weight", "whole"),
    ),
    MLP: (
        ("norm.weight", "pre_mlp_layernorm.weight", "whole"),
        ("mixer.up_proj.weight", "mlp.linear_fc1.weight", "whole"),
        ("mixer.down_proj.weight", "mlp.linear_fc2.weight", "whole"),
    ),
}
"""Below `backbone.layers.N.`."""

COPIES = {"lm_head.weight": EMBEDDING_ROW[0]}
"""Tensors that files may repeat, and the originals."""
