"""Weights of a Hugging Face class as those of our GPT: `foreign.hf` the other way round.

Weights are moved and turned, never computed with, so that out and in again, or in and out, gives
the same bits.

n query heads, g key and value heads, d head channels, h hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainyard.conversion.huggingface.config import GPT2
from trainyard.conversion.huggingface.to_hf import targets
from trainyard.conversion.lazy_tensors import Make, Recipe, as_is
from trainyard.models.gpt.config import GPTConfig


def join_qkv(parts: Sequence[Tensor], config: GPTConfig) -> Tensor:
    """Queries (n d, ...), keys (g d, ...) and values (g d, ...) as one tensor, group by group:
    the queries of a group, its key, its value."""
    q, k, v = parts
    g, d = config.query_groups, config.head_dim
    rest = q.shape[1:]
    per_group = config.num_attention_heads // g
    grouped = [q.view(g, per_group, d, *rest), k.view(g, 1, d, *rest), v.view(g, 1, d, *rest)]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def recipes(config: GPTConfig, name: str) -> dict[str, Recipe]:
    """Every tensor of our model, by its name, from those of the class `name`."""
    parts: dict[str, list[str]] = {}
    for target in targets(config, name):
        parts.setdefault(target.source, []).append(target.name)
    make = _of_gpt2 if name == GPT2 else _of_llama
    return {ours: Recipe(tuple(theirs), make(ours, config)) for ours, theirs in parts.items()}


def _of_llama(name: str, config: GPTConfig) -> Make:
    if ".linear_qkv." in name:
        return lambda parts: join_qkv(parts, config)
    if ".linear_fc1." in name:
        return lambda parts: torch.cat(list(parts))  # gate, up
    return as_is


def _of_gpt2(name: str, config: GPTConfig) -> Make:
    if name.endswith(".linear_qkv.weight"):
        return lambda parts: join_qkv(parts[0].t().chunk(3), config)
    if name.endswith(".linear_qkv.bias"):
        return lambda parts: join_qkv(parts[0].chunk(3), config)
    if ".linear_" in name and name.endswith(".weight"):
        return lambda parts: parts[0].t().contiguous()  # Conv1D keeps (in, out)
    return as_is
