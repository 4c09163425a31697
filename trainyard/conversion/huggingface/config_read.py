"""Converts a config.json of `transformers` to our options: the inverse of `config`.

An absent field has the default of its class in `transformers`. Fields that only training uses
(dropout, the standard deviation of initial weights) are kept if ours has them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from trainyard.checkpoint.bounds import check_layers
from trainyard.conversion.common_options import TANH_GELU, grouped_queries
from trainyard.conversion.fields import Fields
from trainyard.conversion.huggingface.architecture import (
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
from trainyard.conversion.huggingface.bert import BERTS, bert_values
from trainyard.conversion.huggingface.bert import HARMLESS as OF_BERTS
from trainyard.conversion.huggingface.bert import MODEL_TYPES as OF_BERT
from trainyard.conversion.huggingface.config import GPT2_ACTIVATIONS
from trainyard.conversion.huggingface.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEKS,
    deepseek_values,
)
from trainyard.conversion.huggingface.deepseek import HARMLESS as OF_DEEPSEEKS
from trainyard.conversion.huggingface.gpt_oss import GPT_OSS, gpt_oss_values
from trainyard.conversion.huggingface.gpt_oss import HARMLESS as OF_GPT_OSS
from trainyard.conversion.huggingface.mamba import HARMLESS as OF_MAMBAS
from trainyard.conversion.huggingface.mamba import MAMBAS, mamba_values
from trainyard.conversion.huggingface.mamba import MODEL_TYPES as OF_MAMBA
from trainyard.conversion.huggingface.mixture import read_mixture
from trainyard.conversion.huggingface.rope import read_rope
from trainyard.conversion.huggingface.t5 import HARMLESS as OF_T5
from trainyard.conversion.huggingface.t5 import T5, t5_values
from trainyard.conversion.huggingface.windows import tokens_before, window_of_layers
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.t5.config import T5Config

log = logging.getLogger(__name__)

MODEL_TYPES = {
    **{"llama": (LLAMA,), "mistral": (MISTRAL,), "qwen2": (QWEN2,), "qwen3": (QWEN3,)},
    **{"gpt2": (GPT2,), "mixtral": (MIXTRAL,), "qwen3_moe": (QWEN3_MOE,)},
    **OF_BERT,
    **{"t5": (T5,), "deepseek_v2": (DEEPSEEK_V2,), "deepseek_v3": (DEEPSEEK_V3,)},
    "gpt_oss": (GPT_OSS,),
    **OF_MAMBA,
}
"""The classes of each `model_type`; the first where `architectures` names none."""

DEFAULTS: dict[str, dict[str, int]] = {
    LLAMA: {"num_key_value_heads": 0, "max_position_embeddings": 2048},
    MISTRAL: {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    QWEN2: {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    QWEN3: {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    MIXTRAL: {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    QWEN3_MOE: {"num_key_value_heads": 4, "max_position_embeddings": 32768},
}
"""Defaults in which the classes differ; 0 key and value heads: as many as query heads."""

DEFAULT_WINDOW = 4096

HARMLESS = {
    # name, version, origin
    *("architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path"),
    *("_commit_hash", "dtype", "torch_dtype", "task_specific_params", "unsloth_version"),
    *("unsloth_fixed", "tokenizer_class", "finetuning_task"),
    # settings of the program that runs the model
    *("use_cache", "pretraining_tp", "return_dict", "output_hidden_states", "output_attentions"),
    *("use_return_dict", "chunk_size_feed_forward", "gradient_checkpointing", "torchscript"),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("use_bfloat16", "use_flash_attn", "reorder_and_upcast_attn", "is_decoder"),
    "output_router_logits",
    # other tasks
    *("id2label", "label2id", "num_labels", "problem_type", "n_ctx", "summary_type"),
    *("summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout",),
    # generation
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("prefix", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p"),
    *("typical_p", "num_beams", "num_beam_groups", "num_return_sequences", "length_penalty"),
    *("repetition_penalty", "diversity_penalty", "no_repeat_ngram_size", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "output_scores", "remove_invalid_values"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
    *("exponential_decay_length_penalty", "begin_suppress_tokens"),
}
"""Fields that do not change the logits."""


def read_config(document: Any, where: str) -> tuple[str, TransformerConfig, int]:
    """The class of `transformers`, the model, and the rows of its embedding.

    where: names the config.json in messages. Raises ConfigError for a model that ours does not
    compute or an unknown field, ArtifactError for a missing field or one of another type."""
    fields = Fields(document, where)
    name = _class_of(fields, where)
    make: type[TransformerConfig] = GPTConfig
    harmless: Collection[str] = HARMLESS
    if name in BERTS:
        make, values, harmless = BertConfig, bert_values(fields, name), HARMLESS.union(OF_BERTS)
    elif name == T5:
        make, values, harmless = T5Config, t5_values(fields, where), HARMLESS.union(OF_T5)
    elif name in DEEPSEEKS:
        values, harmless = deepseek_values(fields, name, where), HARMLESS.union(OF_DEEPSEEKS)
    elif name == GPT_OSS:
        values, harmless = gpt_oss_values(fields, where), HARMLESS.union(OF_GPT_OSS)
    elif name in MAMBAS:
        values, harmless = mamba_values(fields, name, where), HARMLESS.union(OF_MAMBAS)
        make = MambaConfig
    else:
        values = _gpt2_values(fields) if name == GPT2 else _llama_values(fields, name, where)
    fields.must_be("is_encoder_decoder", name == T5)
    for field in ("add_cross_attention", "tie_encoder_decoder"):
        fields.must_be(field, False)
    fields.must_be("pruned_heads", {})
    check_layers(values["num_layers"], where)
    vocab_size = fields.need("vocab_size", int)
    if fields.maybe("initializer_range", float):
        values["init_method_std"] = fields.maybe("initializer_range", float)
    fields.refuse_rest(harmless)
    if vocab_size < 1:
        raise ArtifactError(f"{where}: vocab_size is {vocab_size}")
    try:
        return name, make(**values), vocab_size
    except ConfigError as error:
        raise ArtifactError(f"{where} describes a model that cannot be built: {error}") from error


def _class_of(fields: Fields, where: str) -> str:
    """The class, chosen by `model_type` as in transformers; `architectures` must agree if given."""
    kind, named = fields.raw("model_type"), fields.raw("architectures")
    names = MODEL_TYPES.get(kind, ()) if isinstance(kind, str) else ()
    for name in names:
        if named in (None, [name]):
            return name
    stated = f"model_type is {kind!r:.60}" if kind is not None else "has no model_type"
    if names:
        stated += f", but architectures is {named!r:.60}, not {' or '.join(names)}"
    known = ", ".join(
        f"{cls} (model_type {kind})" for kind, classes in MODEL_TYPES.items() for cls in classes
    )
    raise ConfigError(f"{where}: {stated}; this version reads {known}")


# --- Llama and its kind -------------------------------------------------------------------------


def _llama_values(fields: Fields, name: str, where: str) -> dict[str, Any]:
    """Options of a GPTConfig."""
    defaults = DEFAULTS[name]
    check_layers(fields.need("num_hidden_layers", int), where)
    heads = fields.need("num_attention_heads", int)
    hidden = fields.need("hidden_size", int)
    if min(heads, hidden) < 1:
        raise ArtifactError(f"{where}: hidden_size {hidden}, num_attention_heads {heads}")
    positions = fields.get("max_position_embeddings", defaults["max_position_embeddings"])
    fields.must_be("hidden_act", "silu", "swish")
    for bias in ("attention_bias", "mlp_bias"):
        fields.must_be(bias, False)
    head_dim = fields.maybe("head_dim", int) or defaults.get("head_dim") or hidden // heads
    return {
        "num_layers": fields.need("num_hidden_layers", int),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": fields.need("intermediate_size", int),
        "kv_channels": None if head_dim * heads == hidden else head_dim,
        **grouped_queries(
            fields.get("num_key_value_heads", defaults["num_key_value_heads"]), heads
        ),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "normalization": "RMSNorm",
        "norm_epsilon": fields.get("rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": name == QWEN2,
        "qk_layernorm": name in (QWEN3, QWEN3_MOE),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.get("attention_dropout", 0.0),
        "untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", False),
        **read_rope(fields, positions, where),
        **_window(fields, name, where),
        **read_mixture(fields, name, where),
    }


def _window(fields: Fields, name: str, where: str) -> dict[str, Any]:
    """Our --window-size, which does not count the token itself, as `sliding_window` does."""
    if name == LLAMA:
        return {}
    width = fields.maybe("sliding_window", int)
    if not fields.stated("sliding_window") and name != MIXTRAL:  # absent: the default; null: none
        width = DEFAULT_WINDOW
    if name in (MISTRAL, MIXTRAL):
        return {} if width is None else {"window_size": f"{tokens_before(width, where)},0"}
    return window_of_layers(
        fields, width if fields.get("use_sliding_window", False) else None, where
    )


# --- GPT-2 --------------------------------------------------------------------------------------


def _gpt2_values(fields: Fields) -> dict[str, Any]:
    positions = fields.get("n_positions", 1024)
    hidden = fields.need("n_embd", int)
    fields.must_be("scale_attn_weights", True)
    fields.must_be("scale_attn_by_inverse_layer_idx", False)
    fields.must_be("tie_word_embeddings", True)
    dropout, of_embedding = fields.get("resid_pdrop", 0.1), fields.get("embd_pdrop", 0.1)
    if dropout != of_embedding:
        log.warning(
            "embd_pdrop %s is replaced by resid_pdrop %s, as our model has one dropout for both",
            *(of_embedding, dropout),
        )
    return {
        "num_layers": fields.need("n_layer", int),
        "hidden_size": hidden,
        "num_attention_heads": fields.need("n_head", int),
        "ffn_hidden_size": fields.maybe("n_inner", int) or 4 * hidden,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "hidden_dropout": dropout,
        "attention_dropout": fields.get("attn_pdrop", 0.1),
        **_activation(fields),
    }


def _activation(fields: Fields) -> Mapping[str, bool]:
    options: dict[str, dict[str, bool]] = {
        **{name: {} for name in TANH_GELU},
        GPT2_ACTIVATIONS["gelu"]: {"bias_gelu_fusion": False},
        GPT2_ACTIVATIONS["quick_gelu"]: {"quick_gelu": True},
        GPT2_ACTIVATIONS["squared_relu"]: {"squared_relu": True},
    }
    fields.must_be("activation_function", *options)
    return options[fields.get("activation_function", TANH_GELU[0])]
