"""Reads of ranks, and the boxes of them that ranks send to each other, in rounds.

In each round every rank reads once, and sends the boxes of other ranks to them. Each knows its own
reads, and what other ranks send to it: who plans them is no concern of this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.checkpoint.copies import device_of
from trainyard.checkpoint.read_jobs import Delivery, ReadJob
from trainyard.checkpoint.safetensors.file import DTYPES, box_of, values_in
from trainyard.checkpoint.safetensors.shard import in_threads, num_threads
from trainyard.parallel.comm_errors import communicating

ALIGNED_BYTES = 8
"""Boxes start at multiples of it in messages."""

Incoming: TypeAlias = Sequence[Mapping[int, Sequence[Delivery]]]
"""For each round, what each rank sends to this one, in its order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part."""

    memories: Sequence[torch.Tensor]
    """Its boxes, to be filled."""
    rank: int
    group: ProcessGroup | None
    """None: of one rank, without rounds."""

    def run(self, jobs: Sequence[ReadJob], incoming: Incoming) -> None:
        """All rounds; `incoming` has equally many on all ranks. Jobs beyond them are for this rank
        alone. Raises an error of this rank after the last one: other ranks wait for it."""
        failure: Exception | None = None
        loaded = _loaded(jobs)
        for number in range(max(len(jobs), len(incoming))):
            own = jobs[number] if number < len(jobs) else None
            data = torch.empty(0, dtype=torch.uint8)
            if own is not None:
                try:
                    data = self._next(own, loaded) if failure is None else _nothing_of(own)
                except Exception as error:
                    failure, data = error, _nothing_of(own)
            if number < len(incoming):
                self._send(own, data, incoming[number])
        if failure is not None:
            raise failure

    def _next(self, job: ReadJob, loaded: Iterator[torch.Tensor]) -> torch.Tensor:
        data = next(loaded)
        for part in job.parts.get(self.rank, ()):
            self._fill(Delivery.of(part), values_in(data, job.read, part))
        return data

    def _send(
        self, own: ReadJob | None, data: torch.Tensor, incoming: Mapping[int, Sequence[Delivery]]
    ) -> None:
        """data: read by this rank in this round."""
        others = {} if own is None else {r: own.parts[r] for r in own.parts if r != self.rank}
        outgoing = {rank: [Delivery.of(part) for part in parts] for rank, parts in others.items()}
        sent = torch.zeros(sum(map(_length, outgoing.values())), dtype=torch.uint8)
        parts = (part for rank in sorted(others) for part in others[rank])
        for part, (_, box) in zip(parts, _boxes(sent, outgoing), strict=True):
            assert own is not None
            box.copy_(values_in(data, own.read, part))
        sizes = {rank: _length(boxes) for rank, boxes in incoming.items()}
        to = {rank: _length(boxes) for rank, boxes in outgoing.items()}
        assert self.group is not None
        received = send_each(sent, to, sizes, self.group)
        for delivery, box in _boxes(received, incoming):
            self._fill(delivery, box)

    def _fill(self, delivery: Delivery, values: torch.Tensor) -> None:
        memory = self.memories[delivery.box].detach()
        box_of(memory, delivery.at, delivery.shape).copy_(values)


def send_each(
    message: torch.Tensor,
    to: Mapping[int, int],
    sizes: Mapping[int, int],
    group: ProcessGroup,
) -> torch.Tensor:
    """Send bytes to some ranks and receive bytes from some; all ranks of the group call it.

    message: what goes to each rank, in the order of ranks. to: its bytes for each. sizes: bytes
    from each. Returns what arrived, in the order of ranks."""
    world = dist.get_world_size(group)
    device = device_of(group)
    received = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=device)
    with communicating("load: exchanging boxes"):
        dist.all_to_all_single(
            received,
            message.to(device),
            [sizes.get(rank, 0) for rank in range(world)],
            [to.get(rank, 0) for rank in range(world)],
            group=group,
        )
    return received


def _loaded(jobs: Sequence[ReadJob]) -> Iterator[torch.Tensor]:
    threads = num_threads(job.file for job in jobs)
    return in_threads(lambda job: job.file.load(job.read), jobs, threads)


def _nothing_of(job: ReadJob) -> torch.Tensor:
    """Zeros for a read that failed; all ranks raise the error at the end."""
    return torch.zeros(job.size_bytes, dtype=torch.uint8)


def _boxes(
    message: torch.Tensor, by_rank: Mapping[int, Sequence[Delivery]]
) -> Iterator[tuple[Delivery, torch.Tensor]]:
    """Each box of a message, with its memory there."""
    begin = 0
    for delivery in (box for rank in sorted(by_rank) for box in by_rank[rank]):
        flat = message[begin : begin + delivery.size_bytes]
        yield delivery, flat.view(DTYPES[delivery.dtype]).view(delivery.shape)
        begin += _padded(delivery)


def _padded(delivery: Delivery) -> int:
    return -(-delivery.size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _length(deliveries: Sequence[Delivery]) -> int:
    return sum(map(_padded, deliveries))
