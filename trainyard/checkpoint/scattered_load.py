"""Loads a step whose files are in several folders, each seen by some ranks alone (see `Sight`).

A rank asks the folders that have what it needs: all ranks that see a folder get the requests to it,
plan its reads alike, divide them among themselves, and tell the ranks that asked what comes in
which round. So a rank knows its own boxes and what is asked of its folder, which grow with neither
ranks nor replicas, and one number of bytes for each pair of a rank and a folder that it asks.

What all replicas need is asked for by one of them, where possible one that sees it, and then sent
to the others."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.checkpoint.copies import Wanted, common_boxes, send_boxes
from trainyard.checkpoint.exchange import Exchange, Incoming, send_each
from trainyard.checkpoint.read_jobs import (
    Delivery,
    Goal,
    Locate,
    ReadJob,
    Request,
    Wants,
    assign_jobs,
    num_sent,
    plan_jobs,
    read_bytes_for,
)
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.ranges import Want
from trainyard.checkpoint.sight import Sight
from trainyard.checkpoint.stored_step import ShardFiles
from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.groups import gather_or_raise

Copies: TypeAlias = Sequence[ProcessGroup]
"""Groups of ranks that may need the same boxes, this rank's; first that of most tensors."""

Asked: TypeAlias = Sequence[Mapping[int, int]]
"""For each rank, the bytes of its requests to each folder that it asks."""


def fill_scattered(
    files: ShardFiles[TensorFile],
    sight: Sight,
    locate: Locate,
    wanted: Sequence[Wanted],
    world: ProcessGroup,
    copies: Copies,
) -> int:
    """Fill memory on all ranks, which call this together; returns the bytes read here.

    An error of one rank is raised on all."""
    own: list[Wanted] = []
    divided: list[tuple[ProcessGroup, list[list[Wanted]]]] = []
    left = list(wanted)
    for group in copies:
        common = common_boxes(left, group)
        shared = [box for box, is_common in zip(left, common, strict=True) if is_common]
        left = [box for box, is_common in zip(left, common, strict=True) if not is_common]
        ranks = dist.get_process_group_ranks(group)
        divide = partial(divide_by_sight, shared, ranks, sight, locate)
        parts = gather_or_raise(divide, world, give=False)[dist.get_rank(world)]
        own += parts[dist.get_rank(group)]
        divided.append((group, parts))
    size = _Load(files, sight, locate, world).fill(own + left)
    with communicating("load: sending boxes to replicas"):
        for group, parts in divided:
            for source, part in enumerate(parts):
                send_boxes([memory for _, _, memory in part], source, group)
    return size


@dataclass(frozen=True, slots=True)
class _Load:
    files: ShardFiles[TensorFile]
    sight: Sight
    locate: Locate
    world: ProcessGroup

    def fill(self, wanted: Sequence[Wanted]) -> int:
        """Fill memory on all ranks; returns the bytes read here."""
        world, rank = self.world, dist.get_rank(self.world)
        boxes = [(name, tuple(offset), tuple(memory.shape)) for name, offset, memory in wanted]
        requests: dict[int, bytes] = {}

        def ask() -> dict[int, int]:
            requests.update(requests_of(boxes, self.sight, self.locate))
            return {folder: len(data) for folder, data in requests.items()}

        asked = gather_or_raise(ask, world)
        folder = self.sight.of_rank[rank]
        received = send_messages(
            {reader: requests[at] for at in requests for reader in self.sight.readers(at)},
            {other: sizes[folder] for other, sizes in enumerate(asked) if folder in sizes},
            world,
        )
        opened: dict[str, TensorFile] = {}

        def plan() -> list[ReadJob]:
            wants = parse_requests(received)
            opened.update(self.files.open_unchecked(name for name, _ in wants))
            return plan_folder(opened, wants, self.sight, folder, asked)[rank]

        jobs = gather_or_raise(plan, world, give=False)[rank]
        rounds = max(gather_or_raise(lambda: num_sent(jobs, rank), world))
        asks = {reader for at in asked[rank] for reader in self.sight.readers(at)} - {rank}
        told = self._tell(schedules(jobs, rank), received.keys() - {rank}, asks)
        exchange = Exchange([memory for _, _, memory in wanted], rank, world)
        incoming = parse_schedules(told, rounds)
        gather_or_raise(lambda: exchange.run(jobs, incoming), world, give=False)
        gather_or_raise(lambda: _check_unchanged(opened.values()), world, give=False)
        return sum(job.size_bytes for job in jobs)

    def _tell(
        self, told: Mapping[int, bytes], askers: Iterable[int], asks: Iterable[int]
    ) -> dict[int, bytes]:
        """Send schedules to the ranks that asked this one; those of the ranks that it asks."""
        sizes = {rank: len(told.get(rank, b"")).to_bytes(8, "little") for rank in askers}
        sent = send_messages(sizes, dict.fromkeys(asks, 8), self.world)
        comes = {rank: int.from_bytes(size, "little") for rank, size in sent.items()}
        return send_messages(told, comes, self.world)


def _check_unchanged(opened: Iterable[TensorFile]) -> None:
    for file in opened:
        file.check_unchanged()


def send_messages(
    outgoing: Mapping[int, bytes], sizes: Mapping[int, int], group: ProcessGroup
) -> dict[int, bytes]:
    """Send a message to each of some ranks; returns those that come, of known sizes."""
    data = bytearray(b"".join(outgoing[rank] for rank in sorted(outgoing)))
    message = (
        torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
    to = {rank: len(part) for rank, part in outgoing.items()}
    received = send_each(message, to, sizes, group).cpu().numpy().tobytes()
    ranks = sorted(sizes)
    ends = pairwise(accumulate((sizes[rank] for rank in ranks), initial=0))
    return {rank: received[begin:end] for rank, (begin, end) in zip(ranks, ends, strict=True)}


# --- what is the same for all replicas ----------------------------------------------------------


def divide_by_sight(
    boxes: Sequence[Wanted], ranks: Sequence[int], sight: Sight, locate: Locate
) -> list[list[Wanted]]:
    """Boxes in parts, one for each of the ranks that need all of them: where possible for one that
    sees most of the box, and balanced. Some parts may be empty."""
    parts: list[list[Wanted]] = [[] for _ in ranks]
    everyone = [(0, place) for place in range(len(ranks))]
    near: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, rank in enumerate(ranks):
        near[sight.of_rank[rank]].append((0, place))
    for name, offset, memory in boxes:
        held: dict[int, int] = defaultdict(int)
        for part in locate(name, offset, memory.shape):
            held[sight.source(part.piece.file)] += torch.Size(part.shape).numel()
        able = near.get(max(held, key=lambda at: (held[at], -at), default=-1)) or everyone
        load, place = able[0]
        heapq.heapreplace(able, (load + memory.nbytes, place))
        parts[place].append((name, offset, memory))
    return parts


# --- requests: from a rank to those that see a folder -------------------------------------------


def requests_of(boxes: Sequence[Request], sight: Sight, locate: Locate) -> dict[int, bytes]:
    """The message of a rank to each folder that has pieces of its boxes."""
    asked: dict[int, list[Any]] = defaultdict(list)
    for number, box in enumerate(boxes):
        for part in locate(*box):
            file, key = part.piece.file, part.piece.key
            request = (file, key, part.offset, part.shape, number, part.at)
            asked[sight.source(file)].append(request)
    return {folder: json.dumps(requests).encode() for folder, requests in asked.items()}


PieceWant: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], Goal]
"""Key of a piece, the offset of a box of it, its shape, and its target."""


def parse_requests(received: Mapping[int, bytes]) -> list[tuple[str, PieceWant]]:
    """Files, and what ranks want of them."""
    return [
        (file, (key, tuple(offset), tuple(shape), Goal(rank, number, tuple(at))))
        for rank in sorted(received)
        for file, key, offset, shape, number, at in json.loads(received[rank])
    ]


def plan_folder(
    opened: Mapping[str, TensorFile],
    wanted: Sequence[tuple[str, PieceWant]],
    sight: Sight,
    folder: int,
    asked: Asked,
) -> dict[int, list[ReadJob]]:
    """The reads of each rank that sees a folder, from all requests to it. Equal on these ranks."""
    wants: Wants = defaultdict(list)
    for file, (key, offset, shape, goal) in wanted:
        wants[file].append(Want(opened[file].extents[key], offset, shape, goal))
    readers = sight.readers(folder)
    senders = max(
        (sum(len(sight.readers(at)) for at in sizes) for sizes in asked if folder in sizes),
        default=1,
    )
    jobs = plan_jobs(opened, wants, read_bytes_for(wants, len(readers), senders))
    return assign_jobs(jobs, readers)


# --- schedules: from a reader to those that get something from it -------------------------------


def schedules(jobs: Sequence[ReadJob], rank: int) -> dict[int, bytes]:
    """For each other rank, the round and the place of each box that it gets."""
    told: dict[int, list[Any]] = defaultdict(list)
    for number, job in enumerate(jobs):
        for other, parts in job.parts.items():
            if other != rank:
                for box in map(Delivery.of, parts):
                    told[other].append((number, box.box, box.at, box.shape, box.dtype))
    return {other: json.dumps(boxes).encode() for other, boxes in told.items()}


def parse_schedules(told: Mapping[int, bytes], num_rounds: int) -> Incoming:
    """What comes in each round."""
    incoming: list[dict[int, list[Delivery]]] = [{} for _ in range(num_rounds)]
    for rank, data in told.items():
        for number, box, at, shape, dtype in json.loads(data) if data else ():
            delivery = Delivery(box, tuple(at), tuple(shape), dtype)
            incoming[number].setdefault(rank, []).append(delivery)
    return incoming
