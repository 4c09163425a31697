"""Steps whose files are in several folders: each byte is read once, by a rank that sees it."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.checkpoint.samples import save
from tests.trainyard.checkpoint.test_load_parallel import MATRIX, layouts, stored
from tests.trainyard.checkpoint.test_load_replicas import replicas
from trainyard.checkpoint import read_jobs
from trainyard.checkpoint.layout import slices_held
from trainyard.checkpoint.load import Checkpoint, open_checkpoint, restore
from trainyard.checkpoint.node_local.read import open_scattered
from trainyard.checkpoint.read_jobs import Delivery, ReadJob, Request, num_sent
from trainyard.checkpoint.safetensors.file import TensorFile, box_of, values_in
from trainyard.checkpoint.scattered_load import (
    divide_by_sight,
    parse_requests,
    parse_schedules,
    plan_folder,
    requests_of,
    schedules,
)
from trainyard.checkpoint.shared_load import LoadGroups, fill_together
from trainyard.checkpoint.sight import Sight
from trainyard.errors import ArtifactError
from trainyard.testing.pool import RankPool

# --- the plans of all ranks, played in one process ----------------------------------------------


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Three tensors of 96 rows in a dozen files."""
    root = str(tmp_path_factory.mktemp("step"))
    save(root, stored(), shard_size_bytes=4000)
    return open_checkpoint(root)


ROWS = st.integers(0, 95).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, 96)))
COLUMNS = st.integers(0, 39).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, 40)))


@st.composite
def wishes(draw: st.DrawFn) -> list[Request]:
    """Boxes that a rank needs."""
    names = draw(st.lists(st.sampled_from(["both", "rows", "columns"]), max_size=3))
    found: list[Request] = []
    for name in names:
        (top, bottom), (left, right) = draw(ROWS), draw(COLUMNS)
        found.append((f"model.{name}", (top, left), (bottom - top, right - left)))
    return found


@st.composite
def sights(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """The folder of each rank, and the folders of each file, as places in a list of folders."""
    of_rank = draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    several = st.lists(st.integers(0, 3), min_size=1, max_size=3)
    return of_rank, draw(st.lists(several, min_size=40, max_size=40))


def sight_of(drawn: tuple[list[int], list[list[int]]], names: Sequence[str]) -> Sight:
    of_rank = [drawn[0].index(folder) for folder in drawn[0]]
    firsts = sorted(set(of_rank))
    folders = {
        name: sorted({firsts[place % len(firsts)] for place in places})
        for name, places in zip(names, drawn[1], strict=False)
    }
    return Sight(of_rank, folders)


@dataclass
class Played:
    """What all ranks did."""

    reads: list[tuple[int, ReadJob]]
    memories: list[list[torch.Tensor]]
    fillings: list[list[torch.Tensor]]
    """How often each element was filled."""


def play(step: Checkpoint, sight: Sight, wanted: Sequence[Sequence[Request]]) -> Played:
    """A load without processes: messages are looked up where they would be received."""
    world = len(sight.of_rank)
    sent = [requests_of(boxes, sight, step.locate) for boxes in wanted]
    asked = [{folder: len(data) for folder, data in messages.items()} for messages in sent]
    memories = [[torch.full(shape, -1.0) for _, _, shape in boxes] for boxes in wanted]
    played = Played([], memories, [[torch.zeros(shape) for _, _, shape in b] for b in wanted])
    jobs: list[list[ReadJob]] = []
    for rank in range(world):
        folder = sight.of_rank[rank]
        received = {r: messages[folder] for r, messages in enumerate(sent) if folder in messages}
        wants = parse_requests(received)
        opened = step.files.open(name for name, _ in wants)
        assert all(folder in sight.folders[name] for name in opened)
        jobs.append(plan_folder(opened, wants, sight, folder, asked)[rank])
    rounds = max(num_sent(own, rank) for rank, own in enumerate(jobs))
    told = [schedules(own, rank) for rank, own in enumerate(jobs)]
    for rank in range(world):
        asks = {reader for folder in sent[rank] for reader in sight.readers(folder)}
        to_me = {other: told[other][rank] for other in range(world) if rank in told[other]}
        assert to_me.keys() <= asks  # else the rank would not know that something comes
        come = parse_schedules(to_me, rounds)
        for number, by_rank in enumerate(come):
            for other, boxes in by_rank.items():
                fill(played, rank, jobs[other][number], boxes)
        for job in jobs[rank]:
            played.reads.append((rank, job))
            fill(played, rank, job, [Delivery.of(part) for part in job.parts.get(rank, ())])
    return played


def fill(played: Played, rank: int, job: ReadJob, boxes: Sequence[Delivery]) -> None:
    data = job.file.load(job.read)
    for part, box in zip(job.parts.get(rank, ()), boxes, strict=True):
        box_of(played.memories[rank][box.box], box.at, box.shape).copy_(
            values_in(data, job.read, part)
        )
        box_of(played.fillings[rank][box.box], box.at, box.shape).add_(1)


@settings(max_examples=20, deadline=None)
@given(drawn=sights(), wanted=st.lists(wishes(), min_size=7, max_size=7), small=st.booleans())
def test_each_byte_is_read_once_by_a_rank_that_sees_it_for_all_that_need_it(
    step: Checkpoint,
    drawn: tuple[list[int], list[list[int]]],
    wanted: list[list[Request]],
    small: bool,
) -> None:
    sight = sight_of(drawn, step.files.names)
    asked = wanted[: len(sight.of_rank)]
    least = 256 if small else read_jobs.LEAST_READ_BYTES
    with mock.patch.multiple(read_jobs, LEAST_READ_BYTES=least, MOST_READ_BYTES=4 * least):
        played = play(step, sight, asked)
    for boxes, memories, filled in zip(asked, played.memories, played.fillings, strict=True):
        for (name, offset, shape), memory, times in zip(boxes, memories, filled, strict=True):
            assert torch.equal(memory, box_of(stored()[name], offset, shape))
            assert times.eq(1).all()
    ends: dict[str, int] = defaultdict(int)
    for rank, job in sorted(played.reads, key=lambda read: (read[1].file.url, read[1].read.begin)):
        name = job.file.url.rpartition("/")[2]
        assert sight.of_rank[rank] in sight.folders[name]
        assert job.read.begin >= ends[name]
        ends[name] = job.read.end


def test_ranks_of_a_folder_share_its_reads_and_read_what_they_need(step: Checkpoint) -> None:
    sight = Sight([0, 0, 2, 2], {name: [0] for name in step.files.names})
    rows: list[list[Request]] = [[("model.both", (24 * r, 0), (24, 40))] for r in range(4)]
    with mock.patch.multiple(read_jobs, LEAST_READ_BYTES=256, MOST_READ_BYTES=256):
        played = play(step, sight, rows)
    read: Counter[int] = Counter()
    for rank, job in played.reads:
        read[rank] += job.size_bytes
        assert set(job.parts) in ({rank}, {2}, {3})
    assert read[0] == read[1] == MATRIX.nbytes // 2
    assert not read.keys() & {2, 3}


def test_what_copies_need_is_asked_for_by_one_that_sees_it(step: Checkpoint) -> None:
    boxes = [(f"model.{name}", (0, 0), torch.zeros(96, 40)) for name in ("both", "rows", "columns")]
    names = sorted(part.piece.file for part in step.locate("model.rows", (0, 0), (96, 40)))
    sight = Sight([0, 0, 2, 3], {n: [2 if n in names else 0] for n in step.files.names})
    parts = divide_by_sight(boxes, [1, 2, 3], sight, step.locate)
    assert [[name for name, _, _ in part] for part in parts] == [
        ["model.both", "model.columns"],
        ["model.rows"],
        [],
    ]
    away = divide_by_sight(boxes, [3], sight, step.locate)
    assert away == [boxes]


def test_a_rank_plans_alone_for_what_is_asked_of_its_folder(step: Checkpoint) -> None:
    """However many other ranks there are."""

    def messages(num_folders: int) -> int:
        names = step.files.names
        sight = Sight(range(num_folders), {n: [k % num_folders] for k, n in enumerate(names)})
        box: Request = ("model.both", (0, 0), (1, 40))
        return sum(map(len, requests_of([box], sight, step.locate).values()))

    assert messages(2) == messages(12)


# --- several processes --------------------------------------------------------------------------

OF_RANK = (0, 0, 2, 3)
"""Two ranks of one node, and two nodes of one rank."""

VALUES = {**stored(), "model.state": MATRIX + 9, "model.turned": MATRIX + 8}


def scattered(folder: Path) -> tuple[list[str], Sight]:
    """A step of which each node has every third file, and two nodes the first one; the folder of
    each rank."""
    save(str(folder / "all"), VALUES, shard_size_bytes=4000)
    with open_checkpoint(str(folder / "all")) as whole:
        names = whole.files.names
    firsts = sorted(set(OF_RANK))
    held = {name: [firsts[number % 3]] for number, name in enumerate(names)}
    held[names[0]] = firsts[:2]
    for first in firsts:
        shutil.copytree(folder / "all", folder / f"node-{first}")
        for name in names:
            if first not in held[name]:
                (folder / f"node-{first}/iter_0000050" / name).unlink()
    return [str(folder / f"node-{first}/iter_0000050") for first in OF_RANK], Sight(OF_RANK, held)


def load_scattered(urls: list[str], sight: Sight, by_replicas: bool) -> int:
    """Bytes that this rank read."""
    rank = dist.get_rank()
    held = layouts(rank % 2, 2) if by_replicas else layouts(rank, 4)
    held["model.turned"] = torch.zeros(40, 96).t()  # not contiguous
    held["model.state"] = torch.zeros(96, 40) if rank else []
    wanted = [
        (part.name, part.offset, part.tensor)
        for name, boxes in sorted(held.items())
        for part in slices_held(name, boxes)
    ]
    assert dist.group.WORLD is not None
    groups = replicas() if by_replicas else LoadGroups(dist.group.WORLD)
    with (
        mock.patch.multiple(read_jobs, LEAST_READ_BYTES=512, MOST_READ_BYTES=512),
        open_scattered(urls[rank], sight, "sizes") as checkpoint,
    ):
        size = fill_together(checkpoint.files, checkpoint.locate, wanted, groups)
    for name, offset, tensor in wanted:
        assert torch.equal(tensor, box_of(VALUES[name], offset, tensor.shape)), (rank, name)
    return size


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("by_replicas", [False, True])
def test_a_step_on_several_nodes_is_loaded_with_each_byte_read_once(
    ranks: RankPool, tmp_path: Path, by_replicas: bool
) -> None:
    urls, sight = scattered(tmp_path)
    sizes = ranks.run(load_scattered, 4, urls, sight, by_replicas)
    assert sum(sizes) == sum(tensor.nbytes for tensor in VALUES.values())


def load_what_one_cannot(urls: list[str], sight: Sight, breaks: str) -> str:
    rank = dist.get_rank()
    assert dist.group.WORLD is not None

    def broken(file: TensorFile, read: object, scratch: object = None) -> torch.Tensor:
        raise ArtifactError(f"{file.url}: ends too soon")

    hurt: Any = mock.patch.object(TensorFile, "load", broken) if breaks == "read" else nullcontext()
    with hurt if rank == 2 else nullcontext():
        try:
            with open_scattered(urls[rank], sight, "sizes") as checkpoint:
                held: Mapping[str, torch.Tensor] = {
                    n: torch.zeros_like(v) for n, v in VALUES.items()
                }
                restore(checkpoint, held, "model.", share=LoadGroups(dist.group.WORLD))
        except ArtifactError as error:
            return str(error)
    return "loaded"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("breaks", ["read", "byte", "file"])
def test_what_fails_on_one_node_is_said_by_all(
    breaks: str, ranks: RankPool, tmp_path: Path
) -> None:
    urls, sight = scattered(tmp_path)
    path = next(Path(urls[2]).glob("model-00002-*"))
    if breaks == "byte":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif breaks == "file":
        path.write_bytes(path.read_bytes()[:-1])
    outcomes = ranks.run(load_what_one_cannot, 4, urls, sight, breaks)
    said = {"read": "ends too soon", "byte": "is damaged", "file": "truncated or was replaced"}
    assert all(said[breaks] in outcome for outcome in outcomes), outcomes
    assert all(outcome.startswith("rank 2 failed to load") for outcome in outcomes[:2])
