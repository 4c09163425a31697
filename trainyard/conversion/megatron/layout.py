"""How Megatron-LM shards parameters over tensor ranks, and the orders of QKV rows of its versions.

    rows    along dim 0: embeddings, output layer, QKV
    gated   along dim 0, each half separately: rank files have [gate_r; up_r]
    columns along dim 1: the matrices that end attention and MLP
    whole   the same on every rank: norms, positions, biases added after a sum
    sizes   along dim 0, blocks of these rows, each separately: z, x, B, C, dt of a Mamba layer

Pure functions. T tensor ranks, n heads, d channels of a head, h hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainyard.models.config import TransformerConfig
from trainyard.models.mamba.config import MambaConfig

Cut = Literal["rows", "gated", "columns", "whole"] | tuple[int, ...]

ROWS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_up_proj.weight",
    "eh_proj.weight",
    "cross_attention.linear_q.weight",
    "cross_attention.linear_q.bias",
    "cross_attention.linear_kv.weight",
    "cross_attention.linear_kv.bias",
    "cross_attention.attn.linear_q.weight",
    "cross_attention.attn.linear_q.bias",
    "cross_attention.attn.linear_kv.weight",
    "cross_attention.attn.linear_kv.bias",
    "core_attention.softmax_offset",
    "mixer.dt_bias",
    "mixer.A_log",
    "mixer.D",
    "mixer.norm.weight",
)
COLUMNS = (
    "self_attention.linear_proj.weight",
    "cross_attention.linear_proj.weight",
    "cross_attention.attn.linear_proj.weight",
    ".linear_fc2.weight",
    "mixer.out_proj.weight",
)
FC1 = (".linear_fc1.weight", ".linear_fc1.bias")
"""Of an MLP, of one expert, and of the shared expert."""


def cut_of(name: str, config: TransformerConfig) -> Cut:
    """How a parameter is sharded, by our name."""
    if isinstance(config, MambaConfig) and ".mixer." in name:
        if name.endswith("in_proj.weight"):
            return config.projected_sizes
        if ".conv1d." in name:
            return config.convolved_sizes
    if name.endswith(ROWS):
        return "rows"
    if name.endswith(FC1):
        return "gated" if config.gated else "rows"
    return "columns" if name.endswith(COLUMNS) else "whole"


def kinds_of_rows(name: str) -> int:
    """3 for rows that are queries, keys and values, 2 for keys and values, otherwise 0."""
    if ".self_attention.linear_qkv." in name:
        return 3
    return 2 if ".cross_attention.linear_kv." in name else 0


# --- reading ----------------------------------------------------------------------------------


def rows_by_head(tensor: Tensor, kinds: int, version: float, head_dim: int) -> Tensor:
    """The QKV rows of one rank's file in the order of version 2: query, key, value of each head.

    kinds: 2 for keys and values alone. Call it before ranks are joined. Version 0 has all queries,
    then all keys, then all values; version 1 has query, key, value of each channel."""
    if version >= 2.0:
        return tensor
    rest = tensor.shape[1:]
    if version >= 1.0:
        by_channel = tensor.reshape(-1, head_dim, kinds, *rest)
        return by_channel.transpose(1, 2).reshape(tensor.shape)
    by_kind = tensor.reshape(kinds, -1, head_dim, *rest)
    return by_kind.transpose(0, 1).reshape(tensor.shape)


def joined_shape(shapes: Sequence[tuple[int, ...]], cut: Cut) -> tuple[int, ...]:
    """The shape of the whole, from those on all tensor ranks. Raises ValueError if they do not fit
    together."""
    first = shapes[0]
    dim = 1 if cut == "columns" else 0
    for shape in shapes:
        if shape != first:
            raise ValueError(f"has different shapes on ranks: {[list(s) for s in shapes[:4]]}")
    if cut == "whole":
        return first
    if len(first) <= dim or (cut == "gated" and first[0] % 2):
        raise ValueError(f"cannot be joined from shards of shape {list(first)}")
    return (*first[:dim], first[dim] * len(shapes), *first[dim + 1 :])


def join_parts(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """A copy of the whole parameter."""
    if cut == "whole" or len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    if cut == "gated":
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves], dim=0)
    if isinstance(cut, tuple):
        blocks = [part.split([size // len(parts) for size in cut]) for part in parts]
        return torch.cat([block for same in zip(*blocks, strict=True) for block in same])
    return torch.cat(list(parts), dim=1 if cut == "columns" else 0)


# --- writing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Boxes:
    """A rank's part of a tensor: boxes, concatenated along dim 0 in its file."""

    offsets: tuple[tuple[int, ...], ...]
    extents: tuple[tuple[int, ...], ...]
    """Shape of each box."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the rank's file."""
        first = self.extents[0]
        if not first:
            return ()
        return (sum(extent[0] for extent in self.extents), *first[1:])


def boxes_of_rank(shape: tuple[int, ...], cut: Cut, rank: int, tp: int) -> Boxes:
    """The part of rank `rank` of `tp` of a parameter of `shape`. Raises ValueError if the shape is
    not divisible."""
    origin = (0,) * len(shape)
    if cut == "whole" or tp == 1:
        return Boxes((origin,), (shape,))
    if isinstance(cut, tuple):
        return _boxes_of_blocks(shape, cut, rank, tp)
    dim, halves = (1, 1) if cut == "columns" else (0, 2 if cut == "gated" else 1)
    if shape[dim] % (tp * halves):
        kind = "columns" if dim else "rows"
        raise ValueError(f"has {shape[dim]} {kind}, which must be divisible by {tp * halves}")
    size = shape[dim] // (tp * halves)
    begins = [half * shape[dim] // halves + rank * size for half in range(halves)]
    offsets = tuple((*origin[:dim], begin, *origin[dim + 1 :]) for begin in begins)
    return Boxes(offsets, ((*shape[:dim], size, *shape[dim + 1 :]),) * halves)


def _boxes_of_blocks(shape: tuple[int, ...], blocks: tuple[int, ...], rank: int, tp: int) -> Boxes:
    if any(block % tp for block in blocks):
        raise ValueError(f"has blocks of {blocks} rows, each of which must be divisible by {tp}")
    sizes = [block // tp for block in blocks]
    begins = [sum(blocks[:i]) + rank * size for i, size in enumerate(sizes)]
    rest = (0,) * (len(shape) - 1)
    return Boxes(
        tuple((begin, *rest) for begin in begins), tuple((size, *shape[1:]) for size in sizes)
    )
