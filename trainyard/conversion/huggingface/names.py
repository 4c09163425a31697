"""Pairs our names of a model's tensors with those of Hugging Face's classes, for every layer.

The tables for one layer are in `models/gpt/checkpoint_names.py` and beside BERT, T5 and
Mamba."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainyard.conversion.huggingface.architecture import GPT2, MIXTRAL, QWEN3_MOE
from trainyard.conversion.huggingface.bert import bert_names
from trainyard.conversion.huggingface.mamba import mamba_names
from trainyard.conversion.huggingface.t5 import t5_names
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt import checkpoint_names
from trainyard.models.gpt.checkpoint_names import OUTPUT, ExpertPart, Part
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.t5.config import T5Config

Row = tuple[str, str, Part | ExpertPart]
"""Their name, ours, and the part of our tensor that theirs is."""

MIXTURES = {
    MIXTRAL: (checkpoint_names.MIXTRAL_ROUTER, checkpoint_names.MIXTRAL_EXPERT),
    QWEN3_MOE: (checkpoint_names.QWEN3_ROUTER, checkpoint_names.QWEN3_EXPERT),
}


def tensor_names(config: TransformerConfig, name: str) -> Iterator[Row]:
    """(their name, ours, part) of every tensor of the Hugging Face class `name`, in its order."""
    if isinstance(config, BertConfig):
        yield from bert_names(config)
        return
    if isinstance(config, T5Config):
        yield from t5_names(config)
        return
    if isinstance(config, MambaConfig):
        yield from mamba_names(config)
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
        rows: Iterable[Row] = of_layer
        if config.has_experts(layer):
            rows = [
                *(row for row in of_layer if not row[1].startswith("mlp.")),
                *_mixture(config, name),
            ]
        for theirs, ours, part in rows:
            if ours not in lacking:
                yield f"{prefix}{layer}.{theirs}", f"decoder.layers.{layer}.{ours}", part


def _mixture(config: TransformerConfig, name: str) -> Iterator[Row]:
    """Rows of the router and of every expert."""
    router, of_expert = MIXTURES[name]
    yield from router
    for expert in range(config.experts.num_experts or 0):
        for theirs, ours, part in of_expert:
            yield theirs.format(expert), ours, ExpertPart(expert, part)
