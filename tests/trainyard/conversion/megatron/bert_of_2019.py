"""The published BERT-345M archives: names, shapes and layout of their files, at any size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.conversion.megatron.names import our_name
from trainyard.models.bert.config import BertConfig

ROWS_OF = {"BertWordPieceLowerCase": 30592, "BertWordPieceCase": 29056}
"""Rows of the two archives."""
TOKENS_OF = {"BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}

OLDEST_LAYER = (
    *("input_layernorm", "attention.query_key_value", "attention.dense"),
    *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)
MATRICES = {
    "attention.query_key_value": (3, 1),
    "attention.dense": (1, 1),
    "mlp.dense_h_to_4h": (4, 1),
    "mlp.dense_4h_to_h": (1, 4),
}
"""Rows and columns in hidden sizes."""


def oldest(config: BertConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """Paths and shapes of the files of 2019."""
    h = config.hidden_size
    found: dict[str, tuple[int, ...]] = {
        "language_model.embedding.word_embeddings.weight": (rows, h),
        "language_model.embedding.position_embeddings.weight": (config.positions, h),
        "language_model.embedding.tokentype_embeddings.weight": (2, h),
        "language_model.transformer.final_layernorm.weight": (h,),
        "language_model.transformer.final_layernorm.bias": (h,),
        "language_model.pooler.dense.weight": (h, h),
        "language_model.pooler.dense.bias": (h,),
        "lm_head.bias": (rows,),
        "lm_head.dense.weight": (h, h),
        "lm_head.dense.bias": (h,),
        "lm_head.layernorm.weight": (h,),
        "lm_head.layernorm.bias": (h,),
        "binary_head.weight": (2, h),
        "binary_head.bias": (2,),
    }
    for layer in range(config.num_layers):
        for name in OLDEST_LAYER:
            path = f"language_model.transformer.layers.{layer}.{name}"
            a, b = MATRICES.get(name, (1, 0))
            found |= {f"{path}.weight": (a * h, b * h) if b else (h,), f"{path}.bias": (a * h,)}
    return found


def save_oldest(folder: Path, config: BertConfig, rows: int, ours: Mapping[str, Tensor]) -> None:
    """As published: no args, no version, queries then keys then values, half precision."""
    tree: dict[str, Any] = {}
    heads = config.num_attention_heads
    for path, shape in oldest(config, rows).items():
        name = our_name(path, tied=True, family="bert")
        assert name is not None
        tensor = ours[name].half()
        if "query_key_value" in path:  # [heads, 3, channels] as [3, heads, channels]
            rest = tensor.shape[1:]
            tensor = tensor.view(heads, 3, -1, *rest).transpose(0, 1).reshape(tensor.shape)
        assert tensor.shape == shape, path
        parts, node = path.split("."), tree
        depth = 2 if parts[0] == "language_model" else 1
        depth = 3 if parts[1] == "embedding" else depth
        for part in parts[:depth]:
            node = node.setdefault(part, {})
        node[".".join(parts[depth:])] = tensor
    (folder / "release/mp_rank_00").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    torch.save(
        {"iteration": 0, "model": tree}, folder / "release/mp_rank_00" / "model_optim_rng.pt"
    )
