"""The parameters that this rank updates: whole ones, its pieces of buckets, or its rows.

In full precision the model's own numbers are updated. 16-bit parameters have an fp32 main copy,
which can take small steps that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.optim.groups import Multipliers, grouped
from trainyard.optim.state import StateBox, state_boxes
from trainyard.optim.update import FlatTensors, Moment, Spans
from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.data.buffers import Bucket, BufferSlot, Member
from trainyard.parallel.data.data_parallel import FULL_PRECISION, DataParallel
from trainyard.parallel.data.fully_sharded import FullyShardedPart
from trainyard.parallel.data.param_gather import all_gather_single
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
    moments: dict[str, Tensor]
    """By name, as long as `main`."""
    multipliers: Multipliers
    is_counted: bool
    """Whether norms count it here: every number of the whole model counts on one rank."""

    @property
    def end(self) -> int:
        """The place in the parameter after its last number."""
        return self.start + self.main.numel()


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of a parameter that its update needs."""

    name: str
    multipliers: Multipliers
    is_counted: bool
    moments: tuple[Moment, ...]


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

    has_matrices = False
    """Whether some rank updates a piece here by orthogonalising its parameter."""
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
            held = [piece.moments.values() for piece in self.pieces[members]]
            moments = zip(*held, strict=True)
            flat = tuple(spans[place] for place in places) if spans else ()
            self.groups.append(Group(multipliers, members, flat, mains, [list(m) for m in moments]))
            begin += len(places)

    def raw_grads(self) -> list[Tensor]:
        """The gradient of each piece as it was added up."""
        raise NotImplementedError

    def grads(self) -> list[Tensor]:
        """The gradient of each piece in the dtype of its main copy."""
        return self.raw_grads()

    def whole_grads(self, grads: list[Tensor]) -> list[Tensor]:
        """For each piece, what `grads` holds of all of its parameter, in the shape of that. All
        data-parallel ranks call it together."""
        return grads

    def adopt(self) -> None:
        """Take the model's parameters over."""

    def publish(self) -> None:
        """Give the model the updated parameters, those of this rank's pieces."""

    def restored(self) -> None:
        """What a checkpoint has was loaded: the weights, and the copies where those are saved."""
        self.publish()

    def boxes(self) -> Iterator[StateBox]:
        """All state by name."""
        for piece in self.pieces:
            shape, shard = tuple(piece.parameter.shape), shard_of(piece.parameter)
            named = dict(piece.moments)
            if self.keeps_main:
                named[MAIN] = piece.main
            for name, tensor in named.items():
                full = f"{name}.{piece.name}"
                yield from state_boxes(full, tensor.view(-1), piece.start, shape, shard)


class WholeParameters(UpdateUnit):
    """The parameters of one rank alone in full precision, whose gradients lie where backward left
    them."""

    def __init__(self, parallel: DataParallel, traits_of: TraitsOf) -> None:
        self._parallel = parallel
        pieces = [_whole(member, traits_of(member)) for member in parallel.members]
        super().__init__(pieces, of_experts=parallel.of_experts)
        self.has_matrices = any(piece.multipliers.is_orthogonalized for piece in pieces)

    def raw_grads(self) -> list[Tensor]:
        """In the shapes of the parameters."""
        return [self._parallel.grad_of(piece.parameter) for piece in self.pieces]


def _whole(member: Member, traits: Traits) -> OwnedPiece:
    parameter = member.parameter
    moments = {m.name: torch.zeros_like(parameter.detach(), dtype=m.dtype) for m in traits.moments}
    return OwnedPiece(
        traits.name, parameter, 0, parameter, moments, traits.multipliers, traits.is_counted
    )


class BucketPiece(UpdateUnit):
    """This rank's part of a bucket; its state is flat, and pieces are views of it."""

    def __init__(
        self,
        bucket: Bucket,
        traits_of: TraitsOf,
        group: ProcessGroup | None = None,
        *,
        of_experts: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        """group: ranks that have the other pieces; None: this one has all of the bucket. part: of
        the piece, the numbers that are meant; unset: all of it."""
        self._bucket, self._group = bucket, group
        first, last = part or (0, bucket.own_stop - bucket.own_start)
        self._params, self._own_grads = bucket.own_params[first:last], bucket.own_grads[first:last]
        self.keeps_main = bucket.params.dtype not in FULL_PRECISION
        self._main = self._new_main()
        traits = [traits_of(place.member) for place in bucket.places]
        moments = _flat_moments(self._main, traits)
        begin, end = bucket.own_start + first, bucket.own_start + last
        found = [_overlap(place, begin, end) for place in bucket.places]
        both = zip(bucket.places, traits, found, strict=True)
        kept = [(place, of, span) for place, of, span in both if span is not None]
        spans = [span for *_, span in kept]
        pieces = [_piece(place, of, self._main, moments, begin, span) for place, of, span in kept]
        super().__init__(pieces, spans, of_experts=of_experts)
        self._spans = [spans[place] for place in self.order]
        self.has_matrices = any(of.multipliers.is_orthogonalized for of in traits)
        if self._main.dtype == torch.float32 and moments is not None and not self.has_matrices:
            params = self._params if self.keeps_main else None
            self.flat = FlatTensors(self._own_grads, self._main, tuple(moments.values()), params)
        self._grads = self._split(self._own_grads)

    def _new_main(self) -> Tensor:
        return self._params.float() if self.keeps_main else self._params

    def raw_grads(self) -> list[Tensor]:
        """Flat."""
        return self._grads

    def grads(self) -> list[Tensor]:
        """Flat; a copy where gradients are added up in another type."""
        grads = self._own_grads
        if grads.dtype == self._main.dtype:
            return self._grads
        return self._split(grads.to(self._main.dtype))

    def whole_grads(self, grads: list[Tensor]) -> list[Tensor]:
        """In the memory of the bucket's gradients, and in their dtype."""
        if grads and self._own_grads.dtype != self._main.dtype:
            torch._foreach_copy_(self._grads, grads)
        if self._group is not None:
            with communicating():
                all_gather_single(self._bucket.grads, self._bucket.own_grads, group=self._group)
        places = {place.member.parameter: place for place in self._bucket.places}
        return [self._bucket.grad_view(places[piece.parameter]) for piece in self.pieces]

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [flat[begin:end] for begin, end in self._spans]

    def adopt(self) -> None:
        """fp32 from the model's 16 bits."""
        if self.keeps_main:
            self._main.copy_(self._params)

    def publish(self) -> None:
        """16 bits from fp32."""
        if self.keeps_main:
            self._params.copy_(self._main)


def _flat_moments(main: Tensor, traits: Sequence[Traits]) -> dict[str, Tensor] | None:
    """The moments of a bucket's piece, as long as it; None where parameters have different ones."""
    kinds = {found.moments for found in traits}
    if len(kinds) != 1:
        return None
    return {kind.name: torch.zeros_like(main, dtype=kind.dtype) for kind in kinds.pop()}


class OwnRows(UpdateUnit):
    """This rank's rows of fully sharded parameters. They are fp32, and the model computes with
    copies of them."""

    def __init__(self, part: FullyShardedPart, traits_of: TraitsOf) -> None:
        self._part = part
        self.keeps_main = part.params_dtype not in FULL_PRECISION
        pieces = [_rows(member, traits_of(member)) for member in part.members]
        super().__init__(pieces, of_experts=part.of_experts)

    def raw_grads(self) -> list[Tensor]:
        """In the shapes of the rows."""
        return [self._part.grad_of(piece.parameter) for piece in self.pieces]

    def adopt(self) -> None:
        """As if the weights had been filled in the model's number format."""
        for piece in self.pieces:
            piece.main.copy_(piece.main.to(self._part.params_dtype))

    def boxes(self) -> Iterator[StateBox]:
        """All state by name."""
        for piece in self.pieces:
            _, shard = held_part(piece.parameter)
            assert shard is not None
            named = dict(piece.moments)
            if self.keeps_main:
                named[MAIN] = piece.main
            for name, tensor in named.items():
                for offset, index in shard.boxes():
                    full = f"{name}.{piece.name}"
                    yield StateBox(full, tensor[index], shard.shape, offset)


def _rows(member: Member, traits: Traits) -> OwnedPiece:
    main, _ = held_part(member.parameter)
    moments = {m.name: torch.zeros_like(main, dtype=m.dtype) for m in traits.moments}
    start = 0  # of `main`, in what this rank holds
    return OwnedPiece(
        *(traits.name, member.parameter, start, main, moments),
        *(traits.multipliers, traits.is_counted),
    )


def _piece(
    place: BufferSlot,
    traits: Traits,
    main: Tensor,
    moments: dict[str, Tensor] | None,
    first: int,
    span: tuple[int, int],
) -> OwnedPiece:
    """The part of a parameter in `span` of a rank's piece of a bucket. moments: of the whole piece;
    None: the part has its own. first: the place of `main` in the bucket."""
    begin, end = span
    own = main[begin:end]
    if moments is None:
        held = {kind.name: torch.zeros_like(own, dtype=kind.dtype) for kind in traits.moments}
    else:
        held = {name: moment[begin:end] for name, moment in moments.items()}
    return OwnedPiece(
        *(traits.name, place.member.parameter, first + begin - place.start, own, held),
        *(traits.multipliers, traits.is_counted),
    )


def _overlap(place: BufferSlot, first: int, last: int) -> tuple[int, int] | None:
    """Of a place with the numbers `first` to `last` of its bucket, counted from `first`."""
    begin, end = max(place.start, first), min(place.stop, last)
    return (begin - first, end - first) if begin < end else None
