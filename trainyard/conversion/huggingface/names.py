"""Pairs our names of a model's tensors with those of Hugging Face's classes, for every layer.

The tables for one layer are in `models/gpt/checkpoint_names.py` and beside BERT, T5 and
Mamba."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainyard.conversion.huggingface.architecture import GPT2, MIXTRAL, QWEN3_MOE
from trainyard.conversion.huggingface.bert import bert_names
from trainyard.conversion.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEKS
from trainyard.conversion.huggingface.gpt_oss import GPT_OSS
from trainyard.conversion.huggingface.mamba import mamba_names
from trainyard.conversion.huggingface.t5 import t5_names
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt import checkpoint_names
from trainyard.models.gpt.checkpoint_names import OUTPUT, ExpertPart, Names, Part
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.t5.config import T5Config

Row = tuple[str, str, Part | ExpertPart]
"""Their name, ours, and the part of our tensor that theirs is."""

MIXTURES = {
    MIXTRAL: (checkpoint_names.MIXTRAL_ROUTER, checkpoint_names.MIXTRAL_EXPERT),
    QWEN3_MOE: (checkpoint_names.QWEN3_ROUTER, checkpoint_names.QWEN3_EXPERT),
    DEEPSEEK_V2: (checkpoint_names.QWEN3_ROUTER, checkpoint_names.QWEN3_EXPERT),
    DEEPSEEK_V3: (checkpoint_names.DEEPSEEK_V3_ROUTER, checkpoint_names.QWEN3_EXPERT),
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
    if name in DEEPSEEKS:
        of_layer = (*_latent_rows(config), *_without_heads(of_layer))
    if name == GPT_OSS:
        of_layer = (*of_layer, *checkpoint_names.GPT_OSS_LAYER)
    lacking = {
        *([] if config.untie_embeddings_and_output_weights else [OUTPUT]),
        *([] if config.qkv_bias else ["self_attention.linear_qkv.bias"]),
        *([] if config.qk_layernorm else [f"self_attention.{x}_layernorm.weight" for x in "qk"]),
    }
    yield from (row for row in whole if row[1] not in lacking)
    for layer in range(config.num_layers):
        for theirs, ours, part in _layer_rows(config, name, of_layer, layer):
            if ours not in lacking:
                yield f"{prefix}{layer}.{theirs}", f"decoder.layers.{layer}.{ours}", part
    if name == DEEPSEEK_V3:
        yield from _prediction_rows(config, of_layer)


def _layer_rows(config: TransformerConfig, name: str, of_layer: Names, layer: int) -> Iterable[Row]:
    if not config.has_experts(layer):
        return of_layer
    return [*(row for row in of_layer if not row[1].startswith("mlp.")), *_mixture(config, name)]


def _prediction_rows(config: TransformerConfig, of_layer: Names) -> Iterator[Row]:
    """Rows of multi-token prediction, whose layers they number on from the last one."""
    for depth, layer in enumerate(config.trained_layers[config.num_layers :]):
        theirs_at, ours_at = f"model.layers.{layer}.", f"mtp.layers.{depth}."
        for theirs, ours, part in checkpoint_names.DEEPSEEK_PREDICTION:
            yield theirs_at + theirs, ours_at + ours, part
        for theirs, ours, of_ours in _layer_rows(config, DEEPSEEK_V3, of_layer, layer):
            yield theirs_at + theirs, f"{ours_at}transformer_layer.{ours}", of_ours


def _latent_rows(config: TransformerConfig) -> Names:
    """Rows of what multi-latent attention makes of the token."""
    queries = checkpoint_names.DEEPSEEK_QUERIES[config.latent.q_lora_rank is not None]
    return (*queries, *checkpoint_names.DEEPSEEK_KEYS)


def _without_heads(rows: Names) -> Iterator[tuple[str, str, Part]]:
    """Rows without those that make queries, keys and values of the token."""
    heads = tuple(f"self_attention.{part}" for part in ("linear_qkv", "q_layer", "k_layer"))
    return (row for row in rows if not row[1].startswith(heads))


def _mixture(config: TransformerConfig, name: str) -> Iterator[Row]:
    """Rows of the router and of every expert."""
    if name == GPT_OSS:
        yield from checkpoint_names.GPT_OSS_MLP
        return
    router, of_expert = MIXTURES[name]
    yield from router
    if config.experts.moe_shared_expert_intermediate_size is not None:
        yield from checkpoint_names.DEEPSEEK_SHARED
    for expert in range(config.experts.num_experts or 0):
        for theirs, ours, part in of_expert:
            yield theirs.format(expert), ours, ExpertPart(expert, part)
