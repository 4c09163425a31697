"""Ranks of a host share files: the same tensors, fewer files, and nobody waits for a lost rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.trainyard.checkpoint.samples import contents, some_tensors
from trainyard.artifacts import store
from trainyard.checkpoint import handover, save
from trainyard.checkpoint.background import BackgroundSave
from trainyard.checkpoint.handover import Address, Door, Received, connect, find_places
from trainyard.checkpoint.layout import LocalTensors, ShardedTensor, slices_held
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.plan import Slice, plan_files, share_files
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.save import plan_step, prepare_step, save_step
from trainyard.checkpoint.steps import find_steps
from trainyard.errors import CommunicationError, InfrastructureError
from trainyard.testing.pool import RankPool

STEP = 50
ROWS = 300_000
"""Of 8 floats on each rank: more than the kernel holds for a connection."""

# --- the plan ---------------------------------------------------------------------------------


def part(kind: str, rank: int, rows: int) -> Slice:
    """A slice that one rank has."""
    return Slice(f"{kind}.{rank}", "F32", (rows, 1), (0, 0), (rows, 1))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), min_size=1),
    st.integers(1, 80),
)
def test_ranks_share_files_in_their_place_up_to_the_limit(
    ranks: list[tuple[int, int, int]], limit_bytes: int
) -> None:
    places = [place for place, _, _ in ranks]
    held = [
        [part(kind, rank, rows) for kind, rows in (("model", a), ("optimizer", b))]
        for rank, (_, a, b) in enumerate(ranks)
    ]
    alone = plan_step(held, 10**9)
    shared = plan_step(held, 10**9, places, limit_bytes)
    assert {s for f in shared for s in f.slices} == {s for f in alone for s in f.slices}
    assert sum(len(f.slices) for f in shared) == sum(len(f.slices) for f in alone)
    for rank, slices in enumerate(held):
        assert {s for f in shared for s in f.held_by(rank)} == set(slices)
    for file in shared:
        holders = {*file.holders, file.writer}
        assert len({places[rank] for rank in holders}) == 1
        assert len(holders) == 1 or sum(s.size_bytes for s in file.slices) <= limit_bytes
    assert plan_step(held, 10**9, range(len(held)), limit_bytes) == alone


def test_with_many_ranks_a_host_has_one_file_of_a_kind() -> None:
    sizes = [(67 << 20 if rank < 800 else 0, 97 << 20) for rank in range(10_000)]
    writers = share_files(sizes, [rank - rank % 8 for rank in range(10_000)])
    assert writers == [rank - rank % 8 for rank in range(10_000)]


def test_ranks_with_much_write_their_own_files() -> None:
    sizes = [(0, 600 << 20)] * 2 + [(0, 200 << 20)] * 6
    assert share_files(sizes, [0] * 8) == [0, 1, 1, 1, 4, 4, 4, 4]


# --- real ranks -------------------------------------------------------------------------------


def tensors_of(rank: int, world_size: int, rows: int = 5) -> dict[str, LocalTensors]:
    """Tensors that all have, slices of one tensor, and one of each rank alone."""
    tensors: dict[str, LocalTensors] = {**some_tensors()}
    whole = torch.arange(float(world_size * rows * 8)).view(world_size * rows, 8)
    tensors["optimizer.cut"] = ShardedTensor(
        "optimizer.cut",
        whole[rank * rows : (rank + 1) * rows],
        tuple(whole.shape),
        (rank * rows, 0),
    )
    tensors[f"rng.own{rank}"] = torch.full((7,), rank, dtype=torch.int64)
    return tensors


def save_grouped(url: str, cases: Sequence[Sequence[int]], settings: dict[str, str]) -> list[str]:
    """Saves with the ranks in other places each time; rank 0 returns the digests of the steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    digests = []
    with mock.patch.dict(os.environ, settings):
        for number, places in enumerate(cases):
            ranks = Ranks(dist.group.WORLD, rank, world, tuple(places))
            for again in range(2):
                target = f"{url}/{number}-{again}"
                save_step(target, STEP, tensors_of(rank, world), contents(STEP), ranks)
                with open_checkpoint(target, verify="digests") as checkpoint:
                    checkpoint.check()
                    digests.append(checkpoint.digest)
    return digests


@pytest.mark.slow
@pytest.mark.distributed
def test_any_grouping_holds_the_same_tensors(
    ranks: RankPool, store_url: str, request: pytest.FixtureRequest
) -> None:
    cases = [(0, 1, 2, 3), (0, 0, 0, 0), (0, 0, 2, 2), (0, 1, 0, 0)]
    is_s3 = store_url.startswith("s3:")
    settings = request.getfixturevalue("s3_settings") if is_s3 else {}
    digests = ranks.run(save_grouped, 4, store_url, cases, settings)[0]
    assert [digests[k] == digests[k + 1] for k in range(0, 8, 2)] == [True] * 4
    expected = tensors_of(0, 4)
    whole = torch.arange(4 * 5 * 8.0).view(20, 8)
    for number, places in enumerate(cases):
        with open_checkpoint(f"{store_url}/{number}-0") as checkpoint:
            names = {*expected, *(f"rng.own{rank}" for rank in range(4))}
            assert set(checkpoint.names()) == names
            for name in names - {"optimizer.cut"}:
                rank = int(name[-1]) if name.startswith("rng.own") else 0
                tensor = tensors_of(rank, 4)[name]
                assert isinstance(tensor, torch.Tensor)
                assert torch.equal(checkpoint.read(name), tensor), name
            assert torch.equal(checkpoint.read("optimizer.cut"), whole)
            files = [name for name in checkpoint.files.names if name.startswith("optimizer")]
            assert len(files) == len(set(places))


def save_in_the_background(folder: str) -> None:
    rank = dist.get_rank()
    ranks = find_places(Ranks(dist.group.WORLD, rank, 3))
    assert ranks.places == (0, 0, 0)
    saving = BackgroundSave(Ranks(dist.new_group(backend="gloo"), rank, 3))
    tensors = tensors_of(rank, 3, ROWS)
    prepared = prepare_step(f"{folder}/run", STEP, tensors, "abc", ranks)
    assert len(prepared.planned) == 3
    saving.start(prepared, contents(STEP), time.monotonic(), lambda *_: None)
    for name, held in tensors.items():  # the values of the start are saved
        for shard in slices_held(name, held):
            shard.tensor.zero_()
    saving.finish()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_save_in_the_background_hands_over_its_snapshot(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_in_the_background, 3, str(tmp_path))
    with open_checkpoint(f"{tmp_path}/run", verify="digests") as checkpoint:
        checkpoint.check()
        whole = torch.arange(3.0 * ROWS * 8).view(3 * ROWS, 8)
        assert torch.equal(checkpoint.read("optimizer.cut"), whole)


def find_strange_places() -> list[tuple[int, ...] | None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(dist.group.WORLD, rank, world)
    found = [find_places(ranks).places]
    with mock.patch.object(socket, "gethostname", return_value=f"host-{rank % 2}"):
        found.append(find_places(ranks).places)

    def refuse(address: Address, rank: int) -> socket.socket:
        raise ConnectionRefusedError

    with mock.patch.object(handover, "connect", refuse if rank == 2 else connect):
        found.append(find_places(ranks).places)
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_share_where_they_reach_each_other(ranks: RankPool) -> None:
    for found in ranks.run(find_strange_places, 4):
        assert found == [(0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 2, 0)]


# --- failures ---------------------------------------------------------------------------------


def save_with_a_fault(folder: str, victim: int, words: str) -> str:
    rank = dist.get_rank()
    ranks = Ranks(dist.group.WORLD, rank, 3, (0, 0, 0))

    def fail(*_: Any, **__: Any) -> Any:
        raise InfrastructureError(words)

    # The rank that writes fails at its file, the others at the tensors that they hand over.
    where, what = (store, "open_output") if victim == 0 else (save, "tensor_chunks")
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(where, what, fail)
        try:
            tensors = tensors_of(rank, 3, ROWS)
            save_step(f"{folder}/run", STEP, tensors, contents(STEP), ranks)
        except InfrastructureError as error:
            return str(error)
    return "saved"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_failure_of_one_rank_is_that_of_all(ranks: RankPool, tmp_path: Path, victim: int) -> None:
    outcomes = ranks.run(save_with_a_fault, 3, str(tmp_path), victim, "the disk is full")
    assert "the disk is full" in outcomes[victim]
    others = [text for rank, text in enumerate(outcomes) if rank != victim]
    assert all(f"rank {victim} failed to save" in text for text in others), outcomes
    assert find_steps(f"{tmp_path}/run") == []
    again = ranks.run(save_with_a_fault, 3, str(tmp_path), 9, "")
    assert again == ["saved"] * 3
    assert find_steps(f"{tmp_path}/run") == [STEP]


POINTS = {"listen": 0, "connect": 1, "send": 1, "accept": 0, "put": 0, "replace": 0}
"""Where a rank is killed: the writer, or one that hands tensors over."""


def be_killed(point: str, patch: pytest.MonkeyPatch) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    places: dict[str, tuple[Any, str]] = {
        "listen": (handover.Lines, "listen"),
        "connect": (handover, "connect"),
        "accept": (Door, "accept"),
        "put": (Received, "put"),
        "replace": (save, "WrittenFile"),
    }
    if point in places:
        patch.setattr(*places[point], die)
        return
    whole = handover.Lines.send

    def send(lines: handover.Lines, data: memoryview) -> bool:
        if len(data) > 1 << 20:
            whole(lines, data[: len(data) // 2])
            die()
        return whole(lines, data)

    patch.setattr(handover.Lines, "send", send)


def rank_that_may_be_killed(folder: str, point: str, rank: int) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=3)
    ranks = Ranks(dist.group.WORLD, rank, 3, (0, 0, 0))
    with pytest.MonkeyPatch.context() as patch:
        if POINTS.get(point) == rank:
            be_killed(point, patch)
        try:
            tensors = tensors_of(rank, 3, ROWS)
            save_step(f"{folder}/run", STEP, tensors, contents(STEP), ranks)
            outcome = "saved"
        except CommunicationError as error:
            outcome = str(error)
    (Path(folder) / f"{rank}.txt").write_text(outcome)
    os._exit(0)


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_rank_hangs_no_other(tmp_path: Path, point: str) -> None:
    context = multiprocessing.get_context("forkserver")
    for attempt in (point, "nowhere"):
        folder = tmp_path / attempt
        folder.mkdir()
        if attempt == "nowhere":  # the next attempt finds what the first has left
            left = tmp_path / point / "run"
            left.mkdir(exist_ok=True)
            left.rename(folder / "run")
        processes = [
            context.Process(target=rank_that_may_be_killed, args=(str(folder), attempt, rank))
            for rank in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
        texts = {path.stem: path.read_text() for path in folder.glob("*.txt")}
        if attempt == "nowhere":
            assert codes == [0, 0, 0]
            assert set(texts.values()) == {"saved"}
            assert find_steps(f"{folder}/run") == [STEP]
            return
        assert codes == [-signal.SIGKILL if r == POINTS[point] else 0 for r in range(3)]
        assert set(texts) == {str(rank) for rank in range(3) if rank != POINTS[point]}
        assert "saved" not in texts.values()
        assert find_steps(f"{folder}/run") == []
        if point == "send":
            assert "rank 1 failed to save: it was lost" in texts["0"]


def test_a_stranger_who_connects_is_sent_away() -> None:
    with Door() as door:
        address = door.address
        stranger = connect(Address(address.name, b"\0" * len(address.secret)), 1)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        silent.connect(address.name)
        silent.shutdown(socket.SHUT_WR)
        other = connect(address, 2)
        mine = connect(address, 1)
        threading.Thread(target=mine.sendall, args=(b"tensor",)).start()
        lines = door.accept([1])
        memory = memoryview(bytearray(6))
        Received(lines[1], 1, 6).put(0, memory)
        assert bytes(memory) == b"tensor"
        for sent_away in (stranger, silent, other):
            assert sent_away.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        connect(address, 1)
    for line in (stranger, silent, other, mine):
        line.close()


def test_a_tensor_that_ends_early_names_its_rank() -> None:
    with Door() as door:
        with connect(door.address, 7) as line:
            lines = door.accept([7])
            line.sendall(b"ten")
        with pytest.raises(CommunicationError, match="rank 7 failed to save: it was lost"):
            Received(lines[7], 7, 6).put(0, memoryview(bytearray(6)))


def test_a_plan_without_places_is_one_file_for_each_rank() -> None:
    held = [[part("model", rank, 3)] for rank in range(4)]
    assert plan_step(held, 10**9) == plan_files("model", held)
