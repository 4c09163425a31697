"""Names of a BERT's parameters in the checkpoints of others. Data only: `conversion` applies it.

Ours are those of Megatron core's BertModel with its local layer. Tables have rows as those of
`gpt.checkpoint_names`."""

from __future__ import annotations

from trainyard.models.gpt.checkpoint_names import Names

# --- Megatron-LM: names outside the layers -----------------------------------------------------

HEADS = (
    *("encoder.final_layernorm.", "lm_head.dense.", "lm_head.layer_norm.", "output_layer.bias"),
    *("binary_head.", "pooler.dense."),
)
"""Prefixes of names of core that are ours as well."""

LEGACY_HEADS = {
    "language_model.pooler.": "pooler.",
    "lm_head.bias": "output_layer.bias",
    "lm_head.norm.": "lm_head.layer_norm.",
    "lm_head.dense.": "lm_head.dense.",
    "binary_head.": "binary_head.",
}
"""The legacy model class, as written since 2023-09: prefixes of names, and ours."""

LEGACY_HEADS_READ = LEGACY_HEADS | {"lm_head.layernorm.": "lm_head.layer_norm."}
"""All spellings of the legacy class."""

HEADS_IN_ORDER = ("lm_head.", "output_layer.", "binary_head.", "pooler.")
"""Prefixes of the heads in the order of the files."""

WITH_EXTRA_STATE = ("output_layer",)
"""Modules outside the layers, beside the final norm, that keep an `_extra_state` in Megatron core's
sharded checkpoints, with a weight of their own or without."""

# --- Hugging Face, in the order of its files --------------------------------------------------

EMBEDDING: Names = (
    ("bert.embeddings.word_embeddings.weight", "embedding.word_embeddings.weight", "whole"),
    ("bert.embeddings.position_embeddings.weight", "embedding.position_embeddings.weight", "whole"),
    (
        "bert.embeddings.token_type_embeddings.weight",
        "embedding.tokentype_embeddings.weight",
        "whole",
    ),
)
WORDS: Names = (
    ("cls.predictions.bias", "output_layer.bias", "whole"),
    ("cls.predictions.transform.dense.weight", "lm_head.dense.weight", "whole"),
    ("cls.predictions.transform.dense.bias", "lm_head.dense.bias", "whole"),
    ("cls.predictions.transform.LayerNorm.weight", "lm_head.layer_norm.weight", "whole"),
    ("cls.predictions.transform.LayerNorm.bias", "lm_head.layer_norm.bias", "whole"),
)
ORDER: Names = (
    ("bert.pooler.dense.weight", "pooler.dense.weight", "whole"),
    ("bert.pooler.dense.bias", "pooler.dense.bias", "whole"),
    ("cls.seq_relationship.weight", "binary_head.weight", "whole"),
    ("cls.seq_relationship.bias", "binary_head.bias", "whole"),
)
"""With the binary head."""

PRE_NORM: Names = (
    ("bert.encoder.ln.weight", "encoder.final_layernorm.weight", "whole"),
    ("bert.encoder.ln.bias", "encoder.final_layernorm.bias", "whole"),
)
PRE_NORM_LAYER: Names = (
    ("attention.ln.weight", "input_layernorm.weight", "whole"),
    ("attention.ln.bias", "input_layernorm.bias", "whole"),
    ("ln.weight", "pre_mlp_layernorm.weight", "whole"),
    ("ln.bias", "pre_mlp_layernorm.bias", "whole"),
)
"""MegatronBert's; below `bert.encoder.layer.N.`, as the tables that follow."""

POST_NORM: Names = (
    ("bert.embeddings.LayerNorm.weight", "embedding.layernorm.weight", "whole"),
    ("bert.embeddings.LayerNorm.bias", "embedding.layernorm.bias", "whole"),
)
POST_NORM_LAYER: Names = (
    ("attention.output.LayerNorm.weight", "post_attention_layernorm.weight", "whole"),
    ("attention.output.LayerNorm.bias", "post_attention_layernorm.bias", "whole"),
    ("output.LayerNorm.weight", "post_mlp_layernorm.weight", "whole"),
    ("output.LayerNorm.bias", "post_mlp_layernorm.bias", "whole"),
)

LAYER: Names = (
    ("attention.self.query.weight", "self_attention.linear_qkv.weight", "q"),
    ("attention.self.key.weight", "self_attention.linear_qkv.weight", "k"),
    ("attention.self.value.weight", "self_attention.linear_qkv.weight", "v"),
    ("attention.self.query.bias", "self_attention.linear_qkv.bias", "q"),
    ("attention.self.key.bias", "self_attention.linear_qkv.bias", "k"),
    ("attention.self.value.bias", "self_attention.linear_qkv.bias", "v"),
    ("attention.output.dense.weight", "self_attention.linear_proj.weight", "whole"),
    ("attention.output.dense.bias", "self_attention.linear_proj.bias", "whole"),
    ("intermediate.dense.weight", "mlp.linear_fc1.weight", "whole"),
    ("intermediate.dense.bias", "mlp.linear_fc1.bias", "whole"),
    ("output.dense.weight", "mlp.linear_fc2.weight", "whole"),
    ("output.dense.bias", "mlp.linear_fc2.bias", "whole"),
)

COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Tensors that files may repeat, and the originals."""
