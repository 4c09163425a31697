"""The classes of `transformers` that compute what our BERT does, their config.json and names.

pre-norm    MegatronBertForPreTraining, without a binary head MegatronBertForMaskedLM
post-norm   BertForPreTraining, BertForMaskedLM"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainyard.conversion.common_options import TANH_GELU
from trainyard.conversion.fields import Fields
from trainyard.errors import ConfigError
from trainyard.models.bert import checkpoint_names as names
from trainyard.models.bert.config import BertConfig
from trainyard.models.gpt.checkpoint_names import Part

CLASSES = {
    (False, True): "MegatronBertForPreTraining",
    (False, False): "MegatronBertForMaskedLM",
    (True, True): "BertForPreTraining",
    (True, False): "BertForMaskedLM",
}
"""By whether norms follow, and whether there is a binary head."""

MODEL_TYPES = {
    "megatron-bert": ("MegatronBertForPreTraining", "MegatronBertForMaskedLM"),
    "bert": ("BertForPreTraining", "BertForMaskedLM"),
}
BERTS = tuple(CLASSES.values())

ACTIVATIONS: dict[str, dict[str, bool]] = {
    "gelu": {"bias_gelu_fusion": False},
    **{name: {"openai_gelu": True} for name in TANH_GELU},
}
"""One function for the layers and the head, and our options for it."""

HARMLESS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "classifier_dropout", "cls_token_id"),
    *("mask_token_id", "unk_token_id"),
)
"""Fields of BERTs that do not change the logits."""


def bert_architecture(config: BertConfig) -> str:
    """The class that computes the same; ConfigError says why none does."""
    rules = {
        "--bias-gelu-fusion, whose tanh GELU the head does not have (give --no-bias-gelu-fusion, "
        "or --openai-gelu for both)": config.activation == "gelu_tanh" and not config.openai_gelu,
        f"activation {config.activation}": config.activation not in ("gelu", "gelu_tanh"),
        f"--position-embedding-type {config.position_embedding_type} (must be learned_absolute)": (
            config.position_embedding_type != "learned_absolute"
        ),
        f"--normalization {config.normalization} (must be LayerNorm)": (
            config.normalization != "LayerNorm"
        ),
        f"--num-tokentypes {config.token_types} (must be 1 or more)": not config.token_types,
        "--disable-bias-linear": config.disable_bias_linear,
        "--qk-layernorm": config.qk_layernorm,
        "--window-size": config.window_size is not None,
        "--group-query-attention": config.query_groups != config.num_attention_heads,
        f"--kv-channels {config.kv_channels} (must be hidden size / attention heads)": (
            config.query_size != config.hidden_size
        ),
        "--untie-embeddings-and-output-weights": config.untie_embeddings_and_output_weights,
        "--apply-layernorm-1p": config.apply_layernorm_1p,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
    }
    name = CLASSES[config.post_layernorm, config.bert_binary_head]
    if broken := [text for text, is_broken in rules.items() if is_broken]:
        raise ConfigError(
            f"--saver hf: {name} does not fit this model. Options that it cannot have: "
            f"{', '.join(broken)}. Keep the checkpoint in our format (--saver trainyard)"
        )
    return name


def bert_document(config: BertConfig) -> dict[str, Any]:
    """The fields of config.json that are a BERT's own."""
    return {
        "model_type": "bert" if config.post_layernorm else "megatron-bert",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        "hidden_act": "gelu_new" if config.openai_gelu else "gelu",
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": True,
        "is_decoder": False,
    }


def bert_values(fields: Fields, name: str) -> dict[str, Any]:
    """Options of a BertConfig."""
    fields.must_be("position_embedding_type", "absolute")
    fields.must_be("tie_word_embeddings", True)
    fields.must_be("is_decoder", False)
    activation = fields.get("hidden_act", "gelu")
    fields.must_be("hidden_act", *ACTIVATIONS)
    positions = fields.get("max_position_embeddings", 512)
    return {
        "num_layers": fields.need("num_hidden_layers", int),
        "hidden_size": fields.need("hidden_size", int),
        "num_attention_heads": fields.need("num_attention_heads", int),
        "ffn_hidden_size": fields.need("intermediate_size", int),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "num_tokentypes": fields.get("type_vocab_size", 2),
        "norm_epsilon": fields.get("layer_norm_eps", 1e-12),
        "hidden_dropout": fields.get("hidden_dropout_prob", 0.1),
        "attention_dropout": fields.get("attention_probs_dropout_prob", 0.1),
        "post_layernorm": not name.startswith("Megatron"),
        "bert_binary_head": name.endswith("ForPreTraining"),
        **ACTIVATIONS[activation],
    }


def bert_names(config: BertConfig) -> Iterator[tuple[str, str, Part]]:
    """(their name, ours, part) of every tensor."""
    post = config.post_layernorm
    yield from names.EMBEDDING
    yield from names.POST_NORM if post else names.PRE_NORM
    of_layer = (*names.LAYER, *(names.POST_NORM_LAYER if post else names.PRE_NORM_LAYER))
    for layer in range(config.num_layers):
        for theirs, ours, part in of_layer:
            yield f"bert.encoder.layer.{layer}.{theirs}", f"encoder.layers.{layer}.{ours}", part
    yield from names.WORDS
    yield from names.ORDER if config.bert_binary_head else ()
