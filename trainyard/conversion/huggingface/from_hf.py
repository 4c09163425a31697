"""Converts weights of a Hugging Face class to those of our GPT: the inverse of `to_hf`.

Weights are moved and transposed, never computed with, so a round trip in either direction gives
the same bits.

n query heads, g key and value heads, d head channels, h hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainyard.conversion.huggingface.names import tensor_names
from trainyard.conversion.lazy_tensors import Make, TensorRecipe, as_is
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.checkpoint_names import ExpertPart, Part


def join_qkv(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    """Queries (n d, ...), keys (g d, ...) and values (g d, ...) as one tensor, group by group:
    the queries of a group, its key, its value."""
    q, k, v = parts
    g, d = config.query_groups, config.head_dim
    rest = q.shape[1:]
    per_group = config.num_attention_heads // g
    grouped = [q.view(g, per_group, d, *rest), k.view(g, 1, d, *rest), v.view(g, 1, d, *rest)]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def join_kv(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    """Keys and values, (g d, ...) each, as one tensor that has them head by head."""
    shape = (config.query_groups, config.head_dim)
    return torch.stack([part.unflatten(0, shape) for part in parts], dim=1).flatten(0, 2)


def recipes(config: TransformerConfig, name: str) -> dict[str, TensorRecipe]:
    """Every tensor of our model, by its name, from those of the class `name`."""
    sources: dict[str, list[str]] = {}
    parts: dict[str, Part | ExpertPart] = {}
    for theirs, ours, part in tensor_names(config, name):
        sources.setdefault(ours, []).append(theirs)
        parts[ours] = part
    return {
        ours: TensorRecipe(tuple(sources[ours]), _make(part, config))
        for ours, part in parts.items()
    }


def join_experts(parts: Sequence[Tensor], num_experts: int) -> Tensor:
    """(experts, out, in) of the matrices of all experts: one of each, or gate and up."""
    each = len(parts) // num_experts
    return torch.stack([torch.cat(list(parts[i : i + each])) for i in range(0, len(parts), each)])


def gates_above_ups(pairs: Tensor) -> Tensor:
    """(experts, 2 f, ...) with the gate of each expert above its up, of rows in pairs."""
    by_kind: Tensor = pairs.unflatten(1, (-1, 2)).transpose(1, 2)
    return by_kind.flatten(1, 2)


def _make(part: Part | ExpertPart, config: TransformerConfig) -> Make:
    """How to make one of our tensors from theirs. part: the last of theirs."""
    if isinstance(part, ExpertPart):
        return lambda parts: join_experts(parts, part.expert + 1)
    if part == "v":
        return lambda parts: join_qkv(parts, config)
    if part == "cross v":
        return lambda parts: join_kv(parts, config)
    if part == "up":
        return lambda parts: torch.cat(list(parts))
    if part == "experts transposed":
        return lambda parts: parts[0].transpose(1, 2).contiguous()
    if part == "pairs":
        return lambda parts: gates_above_ups(parts[0])
    if part == "pairs transposed":
        return lambda parts: gates_above_ups(parts[0].transpose(1, 2))
    if part == "qkv transposed":
        return lambda parts: join_qkv(parts[0].t().chunk(3), config)
    if part == "qkv":
        return lambda parts: join_qkv(parts[0].chunk(3), config)
    if part == "transposed":
        return lambda parts: parts[0].t().contiguous()
    return as_is
