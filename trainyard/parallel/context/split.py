"""Context parallelism: each rank has a part of every sequence.

A sequence is split into 2 x size pieces, and rank i takes pieces i and 2 size - 1 - i: an early
one, whose queries see few keys, and a late one, whose queries see many. So causal attention costs
every rank the same. Tokens, labels, masks and positions are split before the model. Inside it, only
attention needs other parts: through a ring (ring_attention.py) or the exchanges here.

b batch, n query heads, g key and value heads, s local tokens, S all tokens, d head channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.errors import ConfigError
from trainyard.parallel.model import group_size
from trainyard.parallel.tensor import collectives

# --- cutting ----------------------------------------------------------------------------------


def piece_length(length: int, cp_size: int) -> int:
    """Tokens of one of the 2 x cp_size pieces of a sequence."""
    piece, rest = divmod(length, 2 * cp_size)
    if rest or not piece:
        step = 2 * cp_size
        below, above = length // step * step, -(-max(length, 1) // step) * step
        nearest = f"{below} and {above} do" if below else f"{above} does"
        raise ConfigError(
            f"a sequence of {length} tokens (--seq-length) must be divisible by 2 x "
            f"--context-parallel-size ({cp_size}) = {step}: each rank takes an early and a late "
            f"piece; {nearest}"
        )
    return piece


def cut_sequence(tensor: Tensor, dim: int, cp_size: int, cp_rank: int) -> Tensor:
    """This rank's two pieces of a whole sequence along `dim`; one rank alone has it whole."""
    if cp_size == 1:
        return tensor
    piece = piece_length(tensor.shape[dim], cp_size)
    early, late = (
        tensor.narrow(dim, begin, piece) for begin in piece_begins(piece, cp_size, cp_rank)
    )
    return torch.cat((early, late), dim)


def piece_begins(piece: int, cp_size: int, cp_rank: int) -> tuple[int, int]:
    """Where the early and the late piece of a rank begin in the whole sequence."""
    return cp_rank * piece, (2 * cp_size - 1 - cp_rank) * piece


def local_positions(
    length: int, cp_size: int, cp_rank: int, device: torch.device | None = None
) -> Tensor:
    """(s,) positions of this rank's tokens in a sequence of `length`, int64."""
    return cut_sequence(torch.arange(length, device=device), 0, cp_size, cp_rank)


def join_sequence(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole sequence from the parts of all ranks, in the order of ranks: `cut_sequence`
    undone."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat(
        (*(early for early, _ in halves), *(late for _, late in reversed(halves))), dim
    )


def gather_whole(part: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """The whole sequence from this rank's part, `cut_sequence` undone, without a gradient."""
    if group is None:
        return part
    parts = collectives.all_gather(part.detach().unsqueeze(0), group)
    return join_sequence(parts.unbind(0), dim)


def _parts(whole: Tensor, dim: int, size: int) -> list[Tensor]:
    """The parts of all ranks, in the order of ranks: `join_sequence` undone."""
    pieces = whole.chunk(2 * size, dim)
    return [torch.cat((pieces[i], pieces[2 * size - 1 - i]), dim) for i in range(size)]


# --- gathering keys and values ----------------------------------------------------------------


def gather_sequences(tensors: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Each (b, g, s, d) of all ranks as the whole (b, g, S, d), in one exchange.

    Backward adds up what the ranks' queries made of each token and returns it to its rank."""
    whole: tuple[Tensor, ...] = _Gather.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        size = group_size(group)
        message = torch.cat([x.flatten() for x in tensors])
        rows = collectives.all_gather(message, group).view(size, -1)
        columns = rows.split([x.numel() for x in tensors], dim=1)
        return tuple(
            join_sequence([part.view(x.shape) for part in column.unbind(0)], 2)
            for column, x in zip(columns, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        size = group_size(ctx.group)
        columns = [
            torch.stack([part.flatten() for part in _parts(grad, 2, size)]) for grad in grads
        ]
        message = collectives.reduce_scatter(torch.cat(columns, dim=1).flatten(), ctx.group)
        own = message.split([grad.numel() // size for grad in grads])
        shapes = [(*grad.shape[:2], grad.shape[2] // size, grad.shape[3]) for grad in grads]
        return None, *(part.view(shape) for part, shape in zip(own, shapes, strict=True))


# --- heads for tokens -------------------------------------------------------------------------


def sequence_to_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Each (b, heads, s, d), a part of the sequence, as (b, heads / size, S, d), a part of the
    heads, in one exchange (DeepSpeed-Ulysses, arXiv:2309.14509)."""
    exchanged: tuple[Tensor, ...] = _Exchange.apply(group, True, *tensors)  # type: ignore[no-untyped-call]
    return exchanged


def heads_to_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(b, heads / size, S, d) as (b, heads, s, d): `sequence_to_heads` undone."""
    exchanged: tuple[Tensor, ...] = _Exchange.apply(group, False, tensor)  # type: ignore[no-untyped-call]
    return exchanged[0]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(tensors, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_exchange(grads, ctx.group, not ctx.to_heads)


def _exchange(tensors: Sequence[Tensor], group: ProcessGroup, to_heads: bool) -> tuple[Tensor, ...]:
    """Rank i gets the i-th share of the heads, or its part of the sequence, of every rank's."""
    size = group_size(group)
    shares = [x.chunk(size, 1) if to_heads else _parts(x, 2, size) for x in tensors]
    message = torch.cat(
        [torch.cat([part.flatten() for part in to_rank]) for to_rank in zip(*shares, strict=True)]
    )
    rows = collectives.all_to_all_first(message, group).view(size, -1)
    columns = rows.split([parts[0].numel() for parts in shares], dim=1)
    received = [
        [row.view(parts[0].shape) for row in column.unbind(0)]
        for column, parts in zip(columns, shares, strict=True)
    ]
    if to_heads:
        return tuple(join_sequence(parts, 2) for parts in received)
    return tuple(torch.cat(parts, 1) for parts in received)
