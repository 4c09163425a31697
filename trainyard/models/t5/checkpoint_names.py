"""Names of a T5's parameters in the checkpoints of others. Data only: `conversion` applies it.

Ours are those of Megatron core's T5Model with its local layer, except for the output layer. Tables
have rows as those of `gpt.checkpoint_names`."""

from __future__ import annotations

from trainyard.models.gpt.checkpoint_names import Names

# --- Megatron-LM ------------------------------------------------------------------------------

SIGNS = (".cross_attention.linear_q.", ".inter_attention.query.")
"""Parts of names that only a T5 has, core and legacy."""

OUTSIDE = (
    *("encoder.final_layernorm.", "decoder.final_layernorm."),
    *("encoder_relative_pos_emb.", "decoder_relative_pos_emb."),
)
"""Prefixes of names of core outside the layers that are ours as well."""

BIAS, LEGACY_BIAS = "output_layer.bias", "lm_head.bias"

CORE_HEADS = {
    BIAS: "lm_head.output_layer.bias",
    "output_layer.weight": "lm_head.output_layer.weight",
}
"""Our names of the output layer, and core's."""
HEADS = {theirs: ours for ours, theirs in CORE_HEADS.items()} | {LEGACY_BIAS: BIAS}
"""The other way, with that of the legacy class."""

CORE_COPIES = {
    BIAS: (BIAS,),
    "output_layer.weight": ("output_layer.weight",),
    "embedding.position_embeddings.weight": ("position_embeddings.weight",),
}
"""Our names of what files of core have twice, and the further names there."""
REPEATED = tuple(path for paths in CORE_COPIES.values() for path in paths)

LEGACY_ACROSS = {
    "post_attention_norm.": "pre_cross_attn_layernorm.",
    "inter_attention.query.": "cross_attention.linear_q.",
    "inter_attention.key_value.": "cross_attention.linear_kv.",
    "inter_attention.dense.": "cross_attention.linear_proj.",
    "post_inter_attention_norm.": "pre_mlp_layernorm.",
}
"""Layers of a decoder of the legacy class, in addition to `gpt.checkpoint_names.LEGACY`."""

LEGACY_ACROSS_READ = LEGACY_ACROSS | {
    "post_attention_layernorm.": "pre_cross_attn_layernorm.",
    "post_inter_attention_layernorm.": "pre_mlp_layernorm.",
}
"""All spellings."""

WITH_EXTRA_STATE = ("output_layer", "lm_head.output_layer")
"""Modules outside the layers, beside the final norm, that keep an `_extra_state` in Megatron core's
sharded checkpoints, with a weight of their own or without."""

# --- Hugging Face, in the order of its files --------------------------------------------------

SHARED: Names = (("shared.weight", "embedding.word_embeddings.weight", "whole"),)
HEAD: Names = (("lm_head.weight", "output_layer.weight", "whole"),)
"""Of a model whose output layer has weights of its own."""

SELF_ATTENTION: Names = (
    ("SelfAttention.q.weight", "self_attention.linear_qkv.weight", "q"),
    ("SelfAttention.k.weight", "self_attention.linear_qkv.weight", "k"),
    ("SelfAttention.v.weight", "self_attention.linear_qkv.weight", "v"),
    ("SelfAttention.o.weight", "self_attention.linear_proj.weight", "whole"),
    ("layer_norm.weight", "input_layernorm.weight", "whole"),
)
"""Below `block.N.layer.0.`; the tables that follow are below `layer.1.` and so on."""

CROSS_ATTENTION: Names = (
    ("EncDecAttention.q.weight", "cross_attention.linear_q.weight", "whole"),
    ("EncDecAttention.k.weight", "cross_attention.linear_kv.weight", "cross k"),
    ("EncDecAttention.v.weight", "cross_attention.linear_kv.weight", "cross v"),
    ("EncDecAttention.o.weight", "cross_attention.linear_proj.weight", "whole"),
    ("layer_norm.weight", "pre_cross_attn_layernorm.weight", "whole"),
)
MLP: Names = (
    ("DenseReluDense.wi.weight", "mlp.linear_fc1.weight", "whole"),
    ("DenseReluDense.wo.weight", "mlp.linear_fc2.weight", "whole"),
    ("layer_norm.weight", "pre_mlp_layernorm.weight", "whole"),
)
GATED_MLP: Names = (
    ("DenseReluDense.wi_0.weight", "mlp.linear_fc1.weight", "gate"),
    ("DenseReluDense.wi_1.weight", "mlp.linear_fc1.weight", "up"),
    *MLP[1:],
)

POSITIONS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
FINAL_NORM = "final_layer_norm.weight"
"""Below `encoder.` and `decoder.`."""

COPIES = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "shared.weight",
}
"""Tensors that files may repeat, and the originals."""
