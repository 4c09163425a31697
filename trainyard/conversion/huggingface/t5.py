"""The class of `transformers` that computes what our T5 does, its config.json and names.

T5ForConditionalGeneration has relative positions, RMSNorm, no biases, and attention without a
factor. Google's first T5 ties and scales the output layer and has ReLU; v1.1 has an output layer of
its own and a gated GELU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainyard.checkpoint.bounds import check_layers
from trainyard.conversion.fields import Fields
from trainyard.errors import ConfigError
from trainyard.models.gpt.checkpoint_names import Part
from trainyard.models.t5 import checkpoint_names as names
from trainyard.models.t5.config import T5Config

T5 = "T5ForConditionalGeneration"

ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu", "gated-silu": "swiglu"}
"""Theirs, and our option."""

HARMLESS = (
    *("dense_act_fn", "is_gated_act", "initializer_factor", "classifier_dropout", "output_past"),
    *("num_hidden_layers", "decoder_start_token_id"),
)
"""Fields of T5s that follow from others or do not change the logits."""

POSITIONS = 512
"""Longest text of Google's models, which no weight depends on."""


def t5_architecture(config: T5Config) -> str:
    """The class that computes the same; ConfigError says why none does."""
    tied = not config.untie_embeddings_and_output_weights
    rules = {
        f"--position-embedding-type {config.position_embedding_type} (must be relative)": (
            config.position_embedding_type != "relative"
        ),
        f"--normalization {config.normalization} (must be RMSNorm)": (
            config.normalization != "RMSNorm"
        ),
        "no --disable-bias-linear": config.linear_bias,
        "--add-qkv-bias": config.add_qkv_bias,
        "--softmax-scale other than 1": config.attention_scale != 1.0,
        "an activation other than --relu, --geglu and --swiglu": _activation(config) is None,
        "--lm-head-bias": config.has_output_bias,
        "tied weights without --scale-lm-head-input": tied and not config.scale_lm_head_input,
        "--scale-lm-head-input with --untie-embeddings-and-output-weights": (
            config.scale_lm_head_input and not tied
        ),
        "--qk-layernorm": config.qk_layernorm,
        "--group-query-attention": config.query_groups != config.num_attention_heads,
        "--apply-layernorm-1p": config.apply_layernorm_1p,
    }
    if broken := [text for text, is_broken in rules.items() if is_broken]:
        raise ConfigError(
            f"--saver hf: {T5} does not fit this model. Options that it cannot have: "
            f"{', '.join(broken)}. Keep the checkpoint in our format (--saver trainyard)"
        )
    return T5


def _activation(config: T5Config) -> str | None:
    found = (theirs for theirs, option in ACTIVATIONS.items() if getattr(config, option))
    return next(found, None)


def t5_document(config: T5Config) -> dict[str, Any]:
    """The fields of config.json that are a T5's own."""
    return {
        "model_type": "t5",
        "d_model": config.hidden_size,
        "d_kv": config.head_dim,
        "d_ff": config.ffn_size,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.num_attention_heads,
        "relative_attention_num_buckets": config.relative_attention_num_buckets,
        "relative_attention_max_distance": config.relative_attention_max_distance,
        "n_positions": config.positions,
        "dropout_rate": config.hidden_dropout,
        "layer_norm_epsilon": config.norm_epsilon,
        "feed_forward_proj": _activation(config),
        "is_encoder_decoder": True,
        # T5ForConditionalGeneration scales what enters the output layer if this is true.
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def t5_values(fields: Fields, where: str) -> dict[str, Any]:
    """Options of a T5Config."""
    fields.must_be("is_encoder_decoder", True)
    fields.must_be("feed_forward_proj", *ACTIVATIONS)
    activation = fields.get("feed_forward_proj", "relu")
    # transformers 5 says of every T5 that it is tied; v1.1, which is not, does not scale either.
    tied = fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True))
    dropout = fields.get("dropout_rate", 0.1)
    positions = fields.get("n_positions", POSITIONS)
    layers = fields.get("num_layers", 6)
    return {
        "num_layers": layers,
        "decoder_num_layers": check_layers(fields.get("num_decoder_layers", layers), where),
        "hidden_size": fields.need("d_model", int),
        "kv_channels": fields.get("d_kv", 64),
        "ffn_hidden_size": fields.need("d_ff", int),
        "num_attention_heads": fields.need("num_heads", int),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "decoder_seq_length": positions,
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": fields.get("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": fields.get("relative_attention_max_distance", 128),
        "normalization": "RMSNorm",
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-6),
        "disable_bias_linear": True,
        "softmax_scale": 1.0,
        ACTIVATIONS[activation]: True,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "untie_embeddings_and_output_weights": not tied,
        "scale_lm_head_input": tied,
        "lm_head_bias": False,
    }


def t5_names(config: T5Config) -> Iterator[tuple[str, str, Part]]:
    """(their name, ours, part) of every tensor."""
    mlp = names.GATED_MLP if config.gated else names.MLP
    blocks = {
        "encoder": (config.num_layers, (names.SELF_ATTENTION, mlp)),
        "decoder": (config.decoder_layers, (names.SELF_ATTENTION, names.CROSS_ATTENTION, mlp)),
    }
    yield from names.SHARED
    for block, (num_layers, parts_of_layer) in blocks.items():
        for layer in range(num_layers):
            for place, table in enumerate(parts_of_layer):
                for theirs, ours, part in table:
                    name = f"{block}.block.{layer}.layer.{place}.{theirs}"
                    yield name, f"{block}.layers.{layer}.{ours}", part
            if layer == 0:
                positions = f"{block}_relative_pos_emb.relative_attention_bias.weight"
                yield f"{block}.{names.POSITIONS}", positions, "whole"
        yield f"{block}.{names.FINAL_NORM}", f"{block}.final_layernorm.weight", "whole"
    if config.untie_embeddings_and_output_weights:
        yield from names.HEAD
