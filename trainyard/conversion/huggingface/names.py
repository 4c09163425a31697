"""Pairs our names of a model's tensors with those of Hugging Face's classes, for every layer.

The tables for one layer are in `models/gpt/checkpoint_names.py` and beside BERT
and T5."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.conversion.huggingface.architecture import GPT2
from trainyard.conversion.huggingface.bert import bert_names
from trainyard.conversion.huggingface.t5 import t5_names
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt import checkpoint_names
from trainyard.models.gpt.checkpoint_names import OUTPUT, Part
from trainyard.models.t5.config import T5Config


def tensor_names(config: TransformerConfig, name: str) -> Iterator[tuple[str, str, Part]]:
    """(their name, ours, part) of every tensor of the Hugging Face class `name`, in its order."""
    if isinstance(config, BertConfig):
        yield from bert_names(config)
        return
    if isinstance(config, T5Config):
        yield from t5_names(config)
        return
    llama = (checkpoint_names.LLAMA, checkpoint_names.LLAMA_LAYER, "model.layers.")
    gpt2 = (checkpoint_names.GPT2, checkpoint_names.GPT2_LAYER, "transformer.h.")
    whole, of_layer, prefix = gpt2 if name == GPT2 else llama
    lacking = {
        *([] if config.untie_embeddings_and_output_weights else [OUTPUT]),
        *([] if config.qkv_bias else ["self_attention.linear_qkv.bias"]),
        *([] if config.qk_layernorm else [f"self_attention.{x}_layernorm.weight" for x in "qk"]),
    }
    yield from (row for row in whole if row[1] not in lacking)
    for layer in range(config.num_layers):
        for theirs, ours, part in of_layer:
            if ours not in lacking:
                yield f"{prefix}{layer}.{theirs}", f"decoder.layers.{layer}.{ours}", part
