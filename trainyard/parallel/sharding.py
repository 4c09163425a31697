"""The part of a parameter that a rank holds.

A parameter that tensor or expert parallelism shards carries a `Shard`; any other is whole on every
rank that has it. Initialisation, checkpoints and the gradient norm use it, so none depends on
module names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

_MARKS = "_trainyard_"
"""How the attributes begin that say what a parameter is."""
_ATTRIBUTE = "_trainyard_shard"


@dataclass(frozen=True, slots=True)
class ShardBox:
    """Rows (along the cut dim) that lie together both in the shard and in the whole."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim of a parameter of which a rank holds pieces only. With a gated MLP these are a piece of
    the gate and one of the up projection; otherwise there is one."""

    dim: int
    pieces: tuple[ShardBox, ...]

    @property
    def length(self) -> int:
        """Rows that the rank holds."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a parameter: pieces along one dim, or along two where experts are shared out and
    cut besides."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    cuts: tuple[Cut, ...]
    """Cuts of different dims, ascending."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        lengths = {cut.dim: cut.length for cut in self.cuts}
        return tuple(lengths.get(dim, length) for dim, length in enumerate(self.shape))

    def is_cut(self, dim: int) -> bool:
        """Whether the rank holds only a part of this dim."""
        return any(cut.dim == dim for cut in self.cuts)

    def take(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor, contiguous."""
        assert tuple(whole.shape) == self.shape, (whole.shape, self.shape)
        for cut in self.cuts:
            parts = [whole.narrow(cut.dim, p.whole, p.length) for p in cut.pieces]
            whole = torch.cat(parts, cut.dim)
        return whole.contiguous()

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Offset in the whole, and the index of the local tensor, of each piece."""
        for pieces in product(*(cut.pieces for cut in self.cuts)):
            offset = [0] * len(self.shape)
            index = [slice(None)] * len(self.shape)
            for cut, piece in zip(self.cuts, pieces, strict=True):
                offset[cut.dim] = piece.whole
                index[cut.dim] = slice(piece.local, piece.local + piece.length)
            yield tuple(offset), tuple(index)


Parts = int | Sequence[int]
"""Blocks of a dim: how many of one length, or the length of each."""


def even_shard(shape: tuple[int, ...], dim: int, size: int, rank: int, parts: Parts = 1) -> Shard:
    """Part `rank` of `size` of a parameter that is `parts` blocks along `dim`, each cut evenly."""
    return Shard(shape, (even_cut(shape, dim, size, rank, parts),))


def even_cut(shape: tuple[int, ...], dim: int, size: int, rank: int, parts: Parts = 1) -> Cut:
    """The cut of `even_shard`."""
    blocks = [shape[dim] // parts] * parts if isinstance(parts, int) else parts
    assert sum(blocks) == shape[dim], (shape, dim, parts)
    assert not any(block % size for block in blocks), (shape, dim, parts, size)
    pieces: list[ShardBox] = []
    local = whole = 0
    for block in blocks:
        length = block // size
        pieces.append(ShardBox(local, whole + rank * length, length))
        local, whole = local + length, whole + block
    return Cut(dim, tuple(pieces))


def mark_shard(parameter: nn.Parameter, shard: Shard) -> None:
    """Mark `parameter` as this part of a whole."""
    assert tuple(parameter.shape) == shard.local_shape
    setattr(parameter, _ATTRIBUTE, shard)


def shard_of(parameter: Tensor) -> Shard | None:
    """The part that a parameter is; None for a whole one."""
    found: Shard | None = getattr(parameter, _ATTRIBUTE, None)
    return found


_ROWS = "_trainyard_rows"


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of a parameter, or of the part that its `Shard` says."""

    first: int
    stop: int
    dtype: torch.dtype
    """Number format in which the model uses the parameters; they are kept in fp32."""


def mark_rows(parameter: nn.Parameter, rows: HeldRows) -> None:
    """Mark a DTensor that fully sharded data parallelism made of a parameter."""
    setattr(parameter, _ROWS, rows)


def rows_held(parameter: Tensor) -> HeldRows | None:
    """What this rank holds of a fully sharded parameter; None for any other."""
    found: HeldRows | None = getattr(parameter, _ROWS, None)
    return found


def held_part(parameter: Tensor) -> tuple[Tensor, Shard | None]:
    """The numbers of a parameter that this rank holds, as live memory, and which part of the whole
    they are; None for all of it."""
    rows, shard = rows_held(parameter), shard_of(parameter)
    if rows is None:
        return parameter, shard
    local: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return local, rows_of(tuple(parameter.shape), shard, rows.first, rows.stop)


def rows_of(shape: tuple[int, ...], shard: Shard | None, first: int, stop: int) -> Shard:
    """Rows `first` up to `stop` of a parameter of this shape, which is the part `shard` of a whole,
    or the whole."""
    cuts = {cut.dim: cut for cut in shard.cuts} if shard is not None else {}
    before = cuts.get(0, Cut(0, (ShardBox(0, 0, shape[0]),)))
    pieces = []
    for piece in before.pieces:
        begin, end = max(first, piece.local), min(stop, piece.local + piece.length)
        if begin < end:
            pieces.append(ShardBox(begin - first, piece.whole + begin - piece.local, end - begin))
    cuts[0] = Cut(0, tuple(pieces))
    return Shard(shape if shard is None else shard.shape, tuple(cuts[dim] for dim in sorted(cuts)))


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Give `target` all that this module, and others like it, have marked `source` with."""
    for name, value in vars(source).items():
        if name.startswith(_MARKS):
            setattr(target, name, value)


_INTERLEAVED = "_trainyard_interleaved"


def mark_interleaved(parameter: nn.Parameter, rows: tuple[int, ...]) -> None:
    """Mark a matrix that is several ones, whose rows alternate: so many of the first, so many of
    the second, and so on, from the beginning again (queries, keys and values group by group)."""
    setattr(parameter, _INTERLEAVED, rows)


def interleaved_rows(parameter: Tensor) -> tuple[int, ...] | None:
    """The rows of each matrix in a block of an interleaved one; None for a single matrix."""
    found: tuple[int, ...] | None = getattr(parameter, _INTERLEAVED, None)
    return found


_PARTIAL = "_trainyard_partial_grad"


def mark_partial_grad(parameter: nn.Parameter) -> None:
    """Mark a whole parameter of which each tensor-parallel rank computes only a summand of the
    gradient, as it sees only its part of the sequence."""
    setattr(parameter, _PARTIAL, True)


def has_partial_grad(parameter: Tensor) -> bool:
    """Whether the gradient must be summed over the tensor-parallel ranks."""
    return bool(getattr(parameter, _PARTIAL, False))


_EXPERT = "_trainyard_expert"


def mark_expert(parameter: nn.Parameter) -> None:
    """Mark a parameter of routed experts: the ranks that hold the same numbers of it are those of
    the expert data-parallel group."""
    setattr(parameter, _EXPERT, True)


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter belongs to routed experts."""
    return bool(getattr(parameter, _EXPERT, False))
