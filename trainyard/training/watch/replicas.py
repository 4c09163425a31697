"""Checks that data-parallel replicas have the same weights, bit for bit.

Compares a checksum of each parameter, computed on its device, over the ranks with copies. A
difference means that a rank computed or received wrong values, or that a bug let replicas drift:
training would then average two models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainyard.errors import InfrastructureError
from trainyard.parallel.groups import ProcessGroups, gather_objects
from trainyard.parallel.sharding import is_expert
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.step import TrainModule

CHUNK = 2**22
"""Elements per pass: bounds the memory of a check."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MULTIPLIER = -7046029254386353131
"""Odd, with mixed bits (2^64 / golden ratio): weighs elements by position."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """() int64: sum of the bits of all elements, weighed by position."""
    bits = tensor.detach().contiguous().view(BITS[tensor.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        total += (part * (place * MULTIPLIER | 1)).sum()
    return total


def checksums(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, int]]:
    """Each parameter's name and checksum."""
    named = list(parameters)
    if not named:
        return []
    values = torch.stack([checksum(parameter) for _, parameter in named]).tolist()
    return [(name, value) for (name, _), value in zip(named, values, strict=True)]


def _parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in chunks:
        yield from chunk.named_parameters()


def first_difference(
    replicas: Sequence[Sequence[tuple[str, int]]],
) -> tuple[str, list[int]] | None:
    """The first parameter that differs, and the replicas that differ from the majority; None if all
    are equal."""
    for rows in zip(*replicas, strict=True):
        values = [value for _, value in rows]
        if len(set(values)) > 1:
            usual = max(values, key=values.count)
            return rows[0][0], [place for place, value in enumerate(values) if value != usual]
    return None


class ReplicaCheck(Callback):
    """On every rank, every `interval` steps."""

    def __init__(self, train_module: TrainModule, groups: ProcessGroups, interval: int) -> None:
        self._train_module = train_module
        self._groups = groups
        self._interval = interval

    def after_step(self, event: StepEvent) -> None:
        """Compare. Raises InfrastructureError on all ranks of a group that differs."""
        if event.timing is None or event.record.step % self._interval:
            return
        self._train_module.optimizer.finish_parameters()
        named = list(_parameters(self._train_module.chunks))
        apart = self._groups.has_expert_grid
        dense = [pair for pair in named if not (apart and is_expert(pair[1]))]
        self._compare(dense, self._groups.dp_cp, event.record.step)
        if apart:
            experts = [pair for pair in named if is_expert(pair[1])]
            self._compare(experts, self._groups.expert_dp, event.record.step)

    def _compare(
        self, named: Sequence[tuple[str, nn.Parameter]], group: ProcessGroup | None, step: int
    ) -> None:
        """Compare parameters that all ranks of a group hold alike."""
        if group is None:
            return
        found = first_difference(gather_objects(checksums(named), group))
        if found is None:
            return
        name, places = found
        ranks = torch.distributed.get_process_group_ranks(group)
        odd = ", ".join(str(ranks[place]) for place in places)
        raise InfrastructureError(
            f"step {step}: {name} is not the same on all data-parallel replicas: rank "
            f"{odd} differs from the other ranks of {ranks} (--check-weight-hash-across-dp-"
            "replicas-interval). Resume from the last checkpoint before, at which they agreed, "
            "without the machine of that rank"
        )
