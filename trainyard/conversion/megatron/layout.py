"""How Megatron-LM cuts parameters over tensor ranks, and the orders of QKV rows that it has had.

    rows    along dim 0: embeddings, output layer, QKV
    gated   along dim 0, each half of it for itself: rank files hold [gate_r; up_r]
    columns along dim 1: the matrices that end attention and MLP
    whole   the same on every rank: norms, positions, biases added after a sum

Pure. T tensor ranks, n heads, d channels of a head, h hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainyard.models.gpt.config import GPTConfig

Cut = Literal["rows", "gated", "columns", "whole"]

ROWS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "core_attention.softmax_offset",
)
COLUMNS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
FC1 = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")


def cut_of(name: str, config: GPTConfig) -> Cut:
    """How a parameter is cut, by its name here."""
    if name.endswith(ROWS):
        return "rows"
    if name.endswith(FC1):
        return "gated" if config.gated else "rows"
    return "columns" if name.endswith(COLUMNS) else "whole"


def is_qkv(name: str) -> bool:
    """Whether the rows are queries, keys and values."""
    return ".self_attention.linear_qkv." in name


# --- reading ----------------------------------------------------------------------------------


def rows_by_head(tensor: Tensor, version: float, head_dim: int) -> Tensor:
    """The QKV rows of one rank's file, query, key and value of each head side by side, from the
    order of a checkpoint version. To be done before ranks are joined.

    Version 0 holds all queries, then all keys, then all values; version 1 the three of each
    channel; from 2 on nothing is to be done."""
    if version >= 2.0:
        return tensor
    rest = tensor.shape[1:]
    if version >= 1.0:
        by_channel = tensor.reshape(-1, head_dim, 3, *rest)
        return by_channel.transpose(1, 2).reshape(tensor.shape)
    by_kind = tensor.reshape(3, -1, head_dim, *rest)
    return by_kind.transpose(0, 1).reshape(tensor.shape)


def joined_shape(shapes: Sequence[tuple[int, ...]], cut: Cut) -> tuple[int, ...]:
    """The shape of the whole, from those on all tensor ranks. Raises ValueError where they do not
    fit together."""
    first = shapes[0]
    dim = 1 if cut == "columns" else 0
    for shape in shapes:
        if shape != first:
            raise ValueError(f"ranks hold {[list(s) for s in shapes[:4]]}")
    if cut == "whole":
        return first
    if len(first) <= dim or (cut == "gated" and first[0] % 2):
        raise ValueError(f"cannot be put together from {list(first)}")
    return (*first[:dim], first[dim] * len(shapes), *first[dim + 1 :])


def join_parts(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """A copy of the whole parameter."""
    if cut == "whole" or len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    if cut == "gated":
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves], dim=0)
    return torch.cat(list(parts), dim=1 if cut == "columns" else 0)


# --- writing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Boxes:
    """What a rank holds of a whole: boxes of one shape, to be put one above the other."""

    offsets: tuple[tuple[int, ...], ...]
    extent: tuple[int, ...]
    """Of each box."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the rank's file holds."""
        if not self.extent:
            return ()
        return (self.extent[0] * len(self.offsets), *self.extent[1:])


def boxes_of_rank(shape: tuple[int, ...], cut: Cut, rank: int, tp: int) -> Boxes:
    """What rank `rank` of `tp` holds of a parameter of `shape`. Raises ValueError where the shape
    cannot be cut so."""
    origin = (0,) * len(shape)
    if cut == "whole" or tp == 1:
        return Boxes((origin,), shape)
    dim, halves = (1, 1) if cut == "columns" else (0, 2 if cut == "gated" else 1)
    if shape[dim] % (tp * halves):
        raise ValueError(f"{shape[dim]} {'columns' if dim else 'rows'} cannot be cut in {tp}")
    size = shape[dim] // (tp * halves)
    begins = [half * shape[dim] // halves + rank * size for half in range(halves)]
    offsets = tuple((*origin[:dim], begin, *origin[dim + 1 :]) for begin in begins)
    return Boxes(offsets, (*shape[:dim], size, *shape[dim + 1 :]))
