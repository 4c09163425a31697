"""Compares the model of the options with that of a checkpoint of another program."""

from __future__ import annotations

from trainyard.conversion.source import Source, model_shapes, refuse_differences
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig

COMPARED = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "query_groups": "--num-query-groups",
    "head_dim": "--kv-channels",
    "ffn_size": "--ffn-hidden-size",
    "position_embedding_type": "--position-embedding-type",
    "normalization": "--normalization",
    "swiglu": "--swiglu",
    "linear_bias": "--disable-bias-linear",
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "qk_l2_norm": "--qk-l2-norm",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}
"""Properties that must equal those of the loaded model, and their flags."""


def check_same_model(model: TransformerConfig, source: Source) -> None:
    """Raise ConfigError that names the options which differ, or ArtifactError for the tensors."""
    differing = [
        f"{flag} ({getattr(model, name)}; in it {getattr(source.config, name)})"
        for name, flag in COMPARED.items()
        if getattr(model, name) != getattr(source.config, name)
    ]
    if differing:
        raise ConfigError(f"--load {source.url} holds another model: {', '.join(differing)}")
    rows = source.padded_vocab_size
    stored = model_shapes(source.config, rows)
    refuse_differences(stored, model_shapes(model, rows), source.url, "the model of the options")
