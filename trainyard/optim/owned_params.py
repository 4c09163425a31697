"""The parameters that this rank updates: whole ones, its pieces of buckets, or its rows.

In full precision the model's own numbers are updated. 16-bit parameters have an fp32 main copy,
which can take small steps that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard.optim.groups import Multipliers, grouped
from trainyard.optim.state import StateBox, state_boxes
from trainyard.optim.update import FlatTensors, Spans
from trainyard.parallel.data.buffers import Bucket, Member
from trainyard.parallel.data.chunk import Chunk
from trainyard.parallel.data.data_parallel import FULL_PRECISION, DataParallel
from trainyard.parallel.data.fully_sharded import FullyShardedPart
from trainyard.parallel.sharding import held_part, shard_of

MAIN = "param"
"""Name of the fp32 copy among the state tensors."""


@dataclass(frozen=True, slots=True)
class OwnedPiece:
    """Numbers `start` and on of a (flattened) parameter, with their state."""

    name: str
    """Global name; that of the original for a copy."""
    parameter: nn.Parameter
    start: int
    main: Tensor
    moments: tuple[Tensor, ...]
    multipliers: Multipliers
    is_counted: bool
    """Whether norms count it here: every number of the whole model counts on one rank."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of a parameter that its update needs."""

    name: str
    multipliers: Multipliers
    is_counted: bool


TraitsOf = Callable[[Member], Traits]


@dataclass(frozen=True, slots=True)
class Group:
    """A run of pieces that are updated alike."""

    multipliers: Multipliers
    members: slice
    spans: Spans
    """Their places in `UpdateUnit.flat`; empty without it."""
    mains: list[Tensor]
    moments: list[list[Tensor]]
    """Of all of them, one list for each kind."""


class UpdateUnit:
    """Pieces that are updated together, in the order of their groups."""

    keeps_main = False
    """Whether parameters are kept apart from the model's."""
    flat: FlatTensors | None = None
    """All numbers of the pieces in flat memory, if they lie so."""

    def __init__(
        self,
        pieces: Sequence[OwnedPiece],
        spans: Sequence[tuple[int, int]] = (),
        *,
        of_experts: bool = False,
    ) -> None:
        """spans: of the pieces in `flat`. of_experts: they are parameters of routed experts with
        ranks of their own."""
        self.of_experts = of_experts
        found = grouped([piece.multipliers for piece in pieces])
        self.order = [place for places in found.values() for place in places]
        self.pieces = [pieces[place] for place in self.order]
        self.groups: list[Group] = []
        begin = 0
        for multipliers, places in found.items():
            members = slice(begin, begin + len(places))
            # Made once: the device waits while an update is put together.
            mains = [piece.main for piece in self.pieces[members]]
            moments = zip(*(piece.moments for piece in self.pieces[members]), strict=True)
            flat = tuple(spans[place] for place in places) if spans else ()
            self.groups.append(Group(multipliers, members, flat, mains, [list(m) for m in moments]))
            begin += len(places)

    def raw_grads(self) -> list[Tensor]:
        """The gradient of each piece as it was added up."""
        raise NotImplementedError

    def grads(self) -> list[Tensor]:
        """The gradient of each piece in the dtype of its main copy."""
        return self.raw_grads()

    def adopt(self) -> None:
        """Take the model's parameters over."""

    def publish(self) -> None:
        """Give the model the updated parameters, those of this rank's pieces."""

    def boxes(self, moments: Sequence[str]) -> Iterator[StateBox]:
        """All state by name."""
        for piece in self.pieces:
            shape, shard = tuple(piece.parameter.shape), shard_of(piece.parameter)
            named = list(zip(moments, piece.moments, strict=True))
            if self.keeps_main:
                named.append((MAIN, piece.main))
            for name, tensor in named:
                full = f"{name}.{piece.name}"
                yield from state_boxes(full, tensor.view(-1), piece.start, shape, shard)


class WholeParameters(UpdateUnit):
    """The parameters of one rank alone in full precision, whose gradients lie where backward left
    them."""

    def __init__(self, parallel: DataParallel, num_moments: int, traits_of: TraitsOf) -> None:
        self._parallel = parallel
        pieces = [_whole(member, num_moments, traits_of) for member in parallel.members]
        super().__init__(pieces, of_experts=parallel.of_experts)

    def raw_grads(self) -> list[Tensor]:
        """In the shapes of the parameters."""
        return [self._parallel.grad_of(piece.parameter) for piece in self.pieces]


def _whole(member: Member, num_moments: int, traits_of: TraitsOf) -> OwnedPiece:
    parameter, traits = member.parameter, traits_of(member)
    moments = tuple(torch.zeros_like(parameter, requires_grad=False) for _ in range(num_moments))
    return OwnedPiece(
        traits.name, parameter, 0, parameter, moments, traits.multipliers, traits.is_counted
    )


class BucketPiece(UpdateUnit):
    """This rank's part of a bucket; its state is flat, and pieces are views of it."""

    def __init__(
        self, bucket: Bucket, num_moments: int, traits_of: TraitsOf, *, of_experts: bool = False
    ) -> None:
        self._bucket = bucket
        self.keeps_main = bucket.params.dtype not in FULL_PRECISION
        self._main = bucket.own_params.float() if self.keeps_main else bucket.own_params
        self._moments = [torch.zeros_like(self._main) for _ in range(num_moments)]
        found = [_cut(bucket, place.start, place.stop) for place in bucket.places]
        kept = [(place, span) for place, span in zip(bucket.places, found, strict=True) if span]
        spans = [(begin, end) for _, (begin, end) in kept]
        pieces = [
            self._piece(place.member, bucket.own_start + begin - place.start, begin, end, traits_of)
            for place, (begin, end) in kept
        ]
        super().__init__(pieces, spans, of_experts=of_experts)
        self._spans = [spans[place] for place in self.order]
        params = bucket.own_params if self.keeps_main else None
        if self._main.dtype == torch.float32:
            self.flat = FlatTensors(bucket.own_grads, self._main, tuple(self._moments), params)
        self._grads = self._split(bucket.own_grads)

    def _piece(
        self, member: Member, start: int, begin: int, end: int, traits_of: TraitsOf
    ) -> OwnedPiece:
        traits = traits_of(member)
        return OwnedPiece(
            traits.name,
            member.parameter,
            start,
            self._main[begin:end],
            tuple(moment[begin:end] for moment in self._moments),
            traits.multipliers,
            traits.is_counted,
        )

    def raw_grads(self) -> list[Tensor]:
        """Flat."""
        return self._grads

    def grads(self) -> list[Tensor]:
        """Flat; a copy where gradients are added up in another type."""
        grads = self._bucket.own_grads
        if grads.dtype == self._main.dtype:
            return self._grads
        return self._split(grads.to(self._main.dtype))

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [flat[begin:end] for begin, end in self._spans]

    def adopt(self) -> None:
        """fp32 from the model's 16 bits."""
        if self.keeps_main:
            self._main.copy_(self._bucket.own_params)

    def publish(self) -> None:
        """16 bits from fp32."""
        if self.keeps_main:
            self._bucket.own_params.copy_(self._main)


def _cut(bucket: Bucket, start: int, stop: int) -> tuple[int, int] | None:
    """The overlap of a place with this rank's piece, relative to the piece."""
    begin, end = max(start, bucket.own_start), min(stop, bucket.own_stop)
    return (begin - bucket.own_start, end - bucket.own_start) if begin < end else None


class OwnRows(UpdateUnit):
    """This rank's rows of fully sharded parameters. They are fp32, and the model computes with
    copies of them."""

    def __init__(self, part: FullyShardedPart, num_moments: int, traits_of: TraitsOf) -> None:
        self._part = part
        self.keeps_main = part.params_dtype not in FULL_PRECISION
        pieces = [_rows(member, num_moments, traits_of) for member in part.members]
        super().__init__(pieces, of_experts=part.of_experts)

    def raw_grads(self) -> list[Tensor]:
        """In the shapes of the rows."""
        return [self._part.grad_of(piece.parameter) for piece in self.pieces]

    def adopt(self) -> None:
        """As if the weights had been filled in the model's number format."""
        for piece in self.pieces:
            piece.main.copy_(piece.main.to(self._part.params_dtype))

    def boxes(self, moments: Sequence[str]) -> Iterator[StateBox]:
        """All state by name."""
        for piece in self.pieces:
            _, shard = held_part(piece.parameter)
            assert shard is not None
            named = list(zip(moments, piece.moments, strict=True))
            if self.keeps_main:
                named.append((MAIN, piece.main))
            for name, tensor in named:
                for offset, index in shard.boxes():
                    full = f"{name}.{piece.name}"
                    yield StateBox(full, tensor[index], shard.shape, offset)


def _rows(member: Member, num_moments: int, traits_of: TraitsOf) -> OwnedPiece:
    parameter, traits = member.parameter, traits_of(member)
    main, _ = held_part(parameter)
    moments = tuple(torch.zeros_like(main) for _ in range(num_moments))
    start = 0  # of `main`, in what this rank holds
    return OwnedPiece(
        traits.name, parameter, start, main, moments, traits.multipliers, traits.is_counted
    )


def build_units(chunks: Iterable[Chunk], num_moments: int, traits_of: TraitsOf) -> list[UpdateUnit]:
    """Everything that this rank updates."""
    units: list[UpdateUnit] = []
    for chunk in chunks:
        if isinstance(chunk, FullyShardedPart):
            units.append(OwnRows(chunk, num_moments, traits_of))
        elif chunk.buckets:
            units += [
                BucketPiece(bucket, num_moments, traits_of, of_experts=chunk.of_experts)
                for bucket in chunk.buckets
            ]
        elif chunk.members:
            units.append(WholeParameters(chunk, num_moments, traits_of))
    return units
