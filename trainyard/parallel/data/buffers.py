"""Parameters and their gradients in contiguous memory, bucket by bucket.

A bucket is two flat tensors of one layout (buckets.py). The parameters become views of the first,
so that an update or an all-gather needs no copy. The second sums the gradients of backward, in its
own dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainyard.parallel.data.buckets import BucketPlan, ParamSlot, plan_buckets


class Member(NamedTuple):
    """A parameter with its global name."""

    name: str
    parameter: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class BufferSlot:
    """Place of a parameter in its bucket. Compared by identity."""

    member: Member
    start: int
    stop: int


class Bucket:
    """Parameters that one collective serves, of one type and device."""

    def __init__(
        self,
        plan: BucketPlan,
        members: Sequence[Member],
        grad_dtype: torch.dtype | None,
        num_shards: int,
        shard: int,
        is_sent_in_8_bits: bool = False,
    ) -> None:
        """members: all of the model's; grad_dtype None: that of the parameters.

        The rank owns part `shard` of `num_shards` of it. is_sent_in_8_bits: as fp8_codec.py
        does."""
        first = members[plan.slots[0].index].parameter
        self.params = torch.zeros(plan.size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(plan.size, dtype=grad_dtype or first.dtype, device=first.device)
        self.places = tuple(self._adopt(members[slot.index], slot) for slot in plan.slots)
        size = plan.size // num_shards
        self.num_shards, self.is_sent_in_8_bits = num_shards, is_sent_in_8_bits
        self.own_start, self.own_stop = shard * size, (shard + 1) * size

    def _adopt(self, member: Member, slot: ParamSlot) -> BufferSlot:
        parameter = member.parameter
        view = self.params[slot.start : slot.stop].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
        return BufferSlot(member, slot.start, slot.stop)

    @property
    def own_params(self) -> Tensor:
        """The piece of the parameters that this rank updates, flat."""
        return self.params[self.own_start : self.own_stop]

    @property
    def own_grads(self) -> Tensor:
        """The piece of the gradients that this rank has the sum of, flat."""
        return self.grads[self.own_start : self.own_stop]

    def own_span(self, place: BufferSlot) -> tuple[int, int]:
        """The numbers of a parameter that this rank updates: the first, and the one after the last.
        Equal where there are none."""
        begin = min(max(place.start, self.own_start), place.stop)
        return begin - place.start, max(begin, min(place.stop, self.own_stop)) - place.start

    def grad_view(self, place: BufferSlot) -> Tensor:
        """The gradient of one parameter, in its shape."""
        return self.grads[place.start : place.stop].view(place.member.parameter.shape)


def build_buckets(
    members: Iterable[Member],
    *,
    grad_dtype: torch.dtype | None,
    bucket_size: int | None,
    multiple: int,
    num_shards: int = 1,
    shard: int = 0,
    alone: Collection[str] = (),
    sent_in_8_bits: Collection[str] = (),
) -> list[Bucket]:
    """Buckets for all members; those of different types lie apart, and those in `sent_in_8_bits`.
    `alone`: names of parameters that have a bucket each.

    Within a type the order is the reverse of the members'; where types mix, buckets are ordered by
    the member that backward reaches last."""
    numbered = list(members)
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for index, (name, parameter) in enumerate(numbered):
        kind = (parameter.dtype, parameter.device, name in sent_in_8_bits)
        kinds.setdefault(kind, []).append(index)
    found: list[tuple[int, Bucket]] = []
    for (*_, in_8_bits), indices in kinds.items():
        held = [numbered[index] for index in indices]
        plans = plan_buckets(
            [member.parameter.numel() for member in held],
            bucket_size=bucket_size,
            multiple=multiple,
            alone={i for i, member in enumerate(held) if member.name in alone},
        )
        for plan in plans:
            earliest = min(indices[slot.index] for slot in plan.slots)
            bucket = Bucket(plan, held, grad_dtype, num_shards, shard, in_8_bits)
            found.append((-earliest, bucket))
    return [bucket for _, bucket in sorted(found, key=lambda pair: pair[0])]
