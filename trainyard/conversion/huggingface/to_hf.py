"""Converts our GPT's weights to those of the Hugging Face class that computes the same (config.py).

Weights are moved and transposed, never computed with, so the numbers stay the same. The rows that
pad the vocabulary are kept. Names are in names.py.

n query heads, g key and value heads, d head channels, h hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.conversion.huggingface.architecture import architecture
from trainyard.conversion.huggingface.names import tensor_names
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.checkpoint_names import ExpertPart, Part


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the other format, and how it follows from one of ours."""

    name: str
    source: str
    """Name of our parameter."""
    convert: Callable[[Tensor], Tensor]


def split_qkv(tensor: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (n d, ...), keys (g d, ...), values (g d, ...) of a tensor grouped by query group."""
    g, d = config.query_groups, config.head_dim
    per_group = config.num_attention_heads // g
    rest = tensor.shape[1:]
    grouped = tensor.view(g, per_group + 2, d, *rest)
    q, k, v = torch.split(grouped, [per_group, 1, 1], dim=1)
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def split_kv(tensor: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Keys and values, (g d, ...) each, of a tensor that has them head by head."""
    grouped = tensor.unflatten(0, (config.query_groups, 2, config.head_dim))
    k, v = grouped.unbind(1)
    return k.flatten(0, 1), v.flatten(0, 1)


def part_of(tensor: Tensor, part: Part | ExpertPart, config: TransformerConfig) -> Tensor:
    """The part of one of our tensors that makes up a tensor of theirs."""
    if isinstance(part, ExpertPart):
        return part_of(tensor[part.expert], part.part, config)
    if part == "whole":
        return tensor
    if part in ("gate", "up"):
        return tensor.chunk(2, dim=0)[part == "up"]
    if part in ("q", "k", "v"):
        return split_qkv(tensor, config)["qkv".index(part)]
    if part.startswith("cross"):
        return split_kv(tensor, config)[part == "cross v"]
    if part.startswith("pairs"):
        tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if part in ("pairs transposed", "experts transposed"):
        return tensor.transpose(1, 2).contiguous()
    if part.startswith("qkv"):
        tensor = torch.cat(split_qkv(tensor, config))
    return tensor.t().contiguous() if part.endswith("transposed") else tensor


def targets(config: TransformerConfig, name: str | None = None) -> list[Target]:
    """Every tensor of the Hugging Face model, in the order of the class; the parts of one of our
    tensors follow each other. name: the class; None: the one that fits."""

    def convert(part: Part | ExpertPart) -> Callable[[Tensor], Tensor]:
        return lambda tensor: part_of(tensor, part, config)

    found = architecture(config) if name is None else name
    return [
        Target(theirs, ours, convert(part)) for theirs, ours, part in tensor_names(config, found)
    ]
