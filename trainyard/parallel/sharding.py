"""The part of a parameter that a rank holds.

A parameter that tensor parallelism shards carries a `Shard`; any other is whole on every rank that
has it. Initialisation, checkpoints and the gradient norm use it, so none depends on module
names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_trainyard_shard"


@dataclass(frozen=True, slots=True)
class ShardBox:
    """Rows (along the cut dim) that lie together both in the shard and in the whole."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a parameter: pieces along one dim. With a gated MLP a rank has a piece of the gate
    and one of the up projection; otherwise there is one."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    """The dim that is cut."""
    pieces: tuple[ShardBox, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        length = sum(piece.length for piece in self.pieces)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor, contiguous."""
        assert tuple(whole.shape) == self.shape, (whole.shape, self.shape)
        parts = [whole.narrow(self.dim, p.whole, p.length) for p in self.pieces]
        return torch.cat(parts, self.dim).contiguous()

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Offset in the whole, and the index of the local tensor, of each piece."""
        for piece in self.pieces:
            offset = [0] * len(self.shape)
            index = [slice(None)] * len(self.shape)
            offset[self.dim] = piece.whole
            index[self.dim] = slice(piece.local, piece.local + piece.length)
            yield tuple(offset), tuple(index)


def even_shard(shape: tuple[int, ...], dim: int, size: int, rank: int, parts: int = 1) -> Shard:
    """Part `rank` of `size` of a parameter that is `parts` blocks along `dim`, each cut evenly."""
    block, rest = divmod(shape[dim], parts)
    length, rest_of_block = divmod(block, size)
    assert not rest, (shape, dim, parts)
    assert not rest_of_block, (shape, dim, parts, size)
    pieces = tuple(ShardBox(i * length, i * block + rank * length, length) for i in range(parts))
    return Shard(shape, dim, pieces)


def mark_shard(parameter: nn.Parameter, shard: Shard) -> None:
    """Mark `parameter` as this part of a whole."""
    assert tuple(parameter.shape) == shard.local_shape
    setattr(parameter, _ATTRIBUTE, shard)


def shard_of(parameter: Tensor) -> Shard | None:
    """The part that a parameter is; None for a whole one."""
    found: Shard | None = getattr(parameter, _ATTRIBUTE, None)
    return found


_PARTIAL = "_trainyard_partial_grad"


def mark_partial_grad(parameter: nn.Parameter) -> None:
    """Mark a whole parameter of which each tensor-parallel rank computes only a summand of the
    gradient, as it sees only its part of the sequence."""
    setattr(parameter, _PARTIAL, True)


def has_partial_grad(parameter: Tensor) -> bool:
    """Whether the gradient must be summed over the tensor-parallel ranks."""
    return bool(getattr(parameter, _PARTIAL, False))
