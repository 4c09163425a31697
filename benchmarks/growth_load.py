"""The rows `load-local` and `load-index` of `benchmarks.growth`: one rank's part of the plans of a
load of a step on many nodes.

400 matrices, columns of them on each of the 8 ranks of a host, weights and three optimizer states;
each host is a replica, and each rank has its share of the states. The hosts come back in another
order: all states are elsewhere."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainyard.checkpoint.index import (
    Located,
    TensorEntry,
    TensorPiece,
    encode_index,
    locate,
    parse_index,
)
from trainyard.checkpoint.node_local.steps import PartialStep, holders_of, ranges_of
from trainyard.checkpoint.read_jobs import Request, num_sent
from trainyard.checkpoint.safetensors.blocks import num_digits
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.header import Extent, TensorSpec
from trainyard.checkpoint.scattered_load import (
    divide_by_sight,
    parse_requests,
    parse_schedules,
    plan_folder,
    requests_of,
    schedules,
)
from trainyard.checkpoint.sight import Sight

MATRICES, TP = 400, 8
ROWS, COLUMNS = 4096, 512
"""Of a matrix, on one rank."""

STATES = ("param", "exp_avg", "exp_avg_sq")
RANK = 3
"""The one that is measured, on host 0."""

Asked: TypeAlias = list[dict[int, int]]


class PlayedFile(TensorFile):
    """A file of which there is only the header."""

    def __init__(self, name: str, extents: dict[str, Extent]) -> None:
        """Opens nothing."""
        self.url, self.extents, self.metadata = name, extents, {}

    @property
    def is_local(self) -> bool:
        """As on a node."""
        return True


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """The index of a step that some hosts wrote, and its headers."""

    hosts: int
    entries: dict[str, TensorEntry]
    files: dict[str, PlayedFile] = field(default_factory=dict)

    @staticmethod
    def of(hosts: int) -> PlayedStep:
        """As all ranks of these hosts save it."""
        pieces: dict[str, list[TensorPiece]] = defaultdict(list)
        for number in range(MATRICES):
            for tp in range(TP):
                pieces[f"model.{number}"].append(
                    _piece("model", number % hosts, f"model.{number}", (0, tp * COLUMNS), ROWS)
                )
        for host in range(hosts):
            for name, offset, (rows, _) in states_of(hosts, host * TP):
                for tp in range(TP):
                    at = (offset[0], tp * COLUMNS)
                    pieces[name].append(_piece("optimizer", host, name, at, rows))
        step = PlayedStep(hosts, {n: _entry(n, of_name) for n, of_name in pieces.items()})
        ends: dict[str, int] = defaultdict(int)
        for entry in step.entries.values():
            for piece in entry.pieces:
                file = step.files.setdefault(piece.file, PlayedFile(piece.file, {}))
                spec, begin = TensorSpec(entry.dtype, piece.shape), ends[piece.file]
                file.extents[piece.key] = Extent(spec, begin)
                ends[piece.file] += spec.size_bytes
        return step

    def locate(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> list[Located]:
        """As `StoredStep.locate`."""
        return locate(self.entries[name], offset, shape)

    def found(self) -> list[bytes]:
        """What each rank tells of its folder: the first of a host, that it has the files that the
        host before it wrote."""
        names = sorted(self.files)
        held: dict[int, list[int]] = defaultdict(list)
        for number, name in enumerate(names):
            held[(int(name[-17:-12]) + 1) % self.hosts].append(number)
        return [
            pickle.dumps(
                [PartialStep(7, "0" * 64, ranges_of(held[rank // TP]))] if rank % TP == 0 else []
            )
            for rank in range(self.hosts * TP)
        ]


def _piece(kind: str, host: int, name: str, offset: tuple[int, int], rows: int) -> TensorPiece:
    file = f"{kind}-{host:05d}.safetensors"
    shape = (rows, COLUMNS)
    digests = "0" * num_digits(TensorSpec(_dtype(name), shape))
    return TensorPiece(file, f"{name}@{offset[0]},{offset[1]}", offset, shape, digests)


def _dtype(name: str) -> str:
    return "BF16" if name.startswith("model.") else "F32"


def _entry(name: str, pieces: Sequence[TensorPiece]) -> TensorEntry:
    return TensorEntry(_dtype(name), (ROWS, COLUMNS * TP), tuple(pieces))


def states_of(hosts: int, rank: int) -> list[Request]:
    """A rank's boxes of optimizer states: an equal share of the rows of all matrices."""
    host, tp = divmod(rank, TP)
    begin, end = (MATRICES * ROWS * at // hosts for at in (host, host + 1))
    return [
        (
            f"optimizer.{kind}.{number}",
            (max(0, begin - number * ROWS), tp * COLUMNS),
            (min(ROWS, end - number * ROWS) - max(0, begin - number * ROWS), COLUMNS),
        )
        for kind in STATES
        for number in range(begin // ROWS, -(-end // ROWS))
    ]


@dataclass(frozen=True, slots=True)
class Around:
    """What other ranks do, made ready before the measured one plans."""

    found: list[bytes]
    asked: list[bytes]
    """For each rank, its requests in bytes."""
    received: dict[int, bytes]
    """Requests to host 0."""
    told: dict[int, bytes]
    """Schedules for the measured rank."""
    rounds: int


def _sight(found: Sequence[Any], names: Sequence[str], ranks: int) -> Sight:
    parts = {rank: steps[0] for rank, steps in enumerate(found) if steps}
    return Sight([rank - rank % TP for rank in range(ranks)], holders_of(names, parts))


def load_local(ranks: int, scratch: Path) -> Callable[[], None]:
    """Which files are where, what this rank asks for, what it reads for others, and when what it
    asked for comes."""
    hosts = max(2, ranks // TP)
    step = PlayedStep.of(hosts)
    names = sorted(step.files)
    memory = torch.empty((ROWS, COLUMNS), dtype=torch.bfloat16, device="meta")
    weights = [(f"model.{number}", (0, RANK * COLUMNS), memory) for number in range(MATRICES)]
    copies = range(RANK, hosts * TP, TP)
    around = _around(step)

    def plan() -> None:
        found = [pickle.loads(data) for data in around.found]
        sight = _sight(found, names, hosts * TP)
        own = divide_by_sight(weights, copies, sight, step.locate)[0]
        mine = [(name, offset, tuple(memory.shape)) for name, offset, memory in own]
        sent = requests_of(mine + states_of(hosts, RANK), sight, step.locate)
        assert TP in sent, "what it needs of the states is on the next host"
        asked: Asked = [pickle.loads(data) for data in around.asked]
        jobs = plan_folder(step.files, parse_requests(around.received), sight, 0, asked)[RANK]
        assert num_sent(jobs, RANK)
        assert schedules(jobs, RANK)
        assert parse_schedules(around.told, around.rounds)

    return plan


def load_index(ranks: int, scratch: Path) -> Callable[[], None]:
    """What every rank reads before that: the index of the step, of all pieces."""
    data = encode_index(PlayedStep.of(max(2, ranks // TP)).entries)

    def read() -> None:
        assert len(parse_index(json.loads(data), "index.json")) == MATRICES * (1 + len(STATES))

    return read


def _around(step: PlayedStep) -> Around:
    hosts, found = step.hosts, step.found()
    ranks = hosts * TP
    sight = _sight([pickle.loads(data) for data in found], sorted(step.files), ranks)
    asked: Asked = []
    received: dict[int, bytes] = {}
    next_host: dict[int, bytes] = {}
    for rank in range(ranks):
        sent = requests_of(states_of(hosts, rank), sight, step.locate)
        asked.append({folder: len(data) for folder, data in sent.items()})
        if 0 in sent:
            received[rank] = sent[0]
        if TP in sent:
            next_host[rank] = sent[TP]
    theirs = plan_folder(step.files, parse_requests(next_host), sight, TP, asked)
    told = {reader: schedules(theirs[reader], reader) for reader in theirs}
    mine = {reader: boxes[RANK] for reader, boxes in told.items() if RANK in boxes}
    rounds = max(num_sent(jobs, reader) for reader, jobs in theirs.items())
    return Around(found, [pickle.dumps(sizes) for sizes in asked], received, mine, rounds)
