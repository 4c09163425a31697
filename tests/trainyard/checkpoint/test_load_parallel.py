"""Loading by threads and by several ranks: the same tensors, and no byte fetched twice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.checkpoint.samples import save, some_tensors
from trainyard.artifacts import store
from trainyard.checkpoint import read_jobs, shared_load
from trainyard.checkpoint.layout import LocalTensors, ShardedTensor, slices_held
from trainyard.checkpoint.load import Checkpoint, open_checkpoint, restore
from trainyard.checkpoint.safetensors import file as tensorfile
from trainyard.checkpoint.safetensors.file import TensorFile, box_of
from trainyard.checkpoint.shared_load import LoadGroups
from trainyard.errors import ArtifactError
from trainyard.testing.pool import RankPool

MATRIX = torch.arange(96.0 * 40).view(96, 40)


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tensors take many reads."""
    monkeypatch.setattr(tensorfile, "READ_BYTES", 512)


@pytest.mark.slow
@pytest.mark.usefixtures("small_reads")
@pytest.mark.parametrize("shard_size_bytes", [2**32, 500])
def test_many_reads_by_threads_fill_what_one_would(store_url: str, shard_size_bytes: int) -> None:
    held = {**some_tensors(), "model.matrix": MATRIX, "model.row": MATRIX[:1].clone()}
    save(store_url, held, shard_size_bytes=shard_size_bytes)
    targets = {name: torch.full_like(tensor, 7) for name, tensor in held.items()}
    with open_checkpoint(store_url) as checkpoint:
        for prefix in ("model.", "optimizer.", "rng."):
            own = {name: t for name, t in targets.items() if name.startswith(prefix)}
            restore(checkpoint, own, prefix)
    assert all(torch.equal(targets[name], tensor) for name, tensor in held.items())


@pytest.mark.usefixtures("small_reads")
def test_slices_of_other_types_strides_and_owners_are_filled(tmp_path: Path) -> None:
    save(str(tmp_path), {"model.matrix": MATRIX}, shard_size_bytes=4000)
    turned = torch.zeros(40, 96).t()  # not contiguous
    half = torch.zeros(50, 7, dtype=torch.bfloat16, requires_grad=True)
    flat = torch.zeros(3, 40)
    shards = [
        ShardedTensor("model.matrix", half, (96, 40), (30, 11)),
        ShardedTensor("model.matrix", turned[:90], (96, 40), (3, 0)),
        ShardedTensor("model.matrix", flat, (96, 40), (93, 0)),
    ]
    restore(open_checkpoint(str(tmp_path)), {"model.matrix": shards}, "model.")
    assert torch.equal(half, MATRIX[30:80, 11:18].to(torch.bfloat16))
    assert torch.equal(turned[:90], MATRIX[3:93])
    assert torch.equal(flat, MATRIX[93:])


def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes by file that are fetched from a remote store from here on."""
    counts: Counter[str] = Counter()
    read_range = store.read_range

    def counting(url: str, start: int, end: int, version: str | None = None) -> bytes:
        counts[url.rpartition("/")[2]] += end - start
        return read_range(url, start, end, version)

    monkeypatch.setattr(store, "read_range", counting)
    return counts


def test_an_object_store_is_asked_for_each_byte_once(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.randn(3000, 64, generator=torch.Generator().manual_seed(1))
    save(s3_url, {"model.large": large, "model.small": MATRIX})
    shards: dict[str, LocalTensors] = {
        "model.large": [
            ShardedTensor("model.large", torch.zeros(3000, 20), (3000, 64), (0, 0)),
            ShardedTensor("model.large", torch.zeros(3000, 44), (3000, 64), (0, 20)),
        ],
        "model.small": torch.zeros(96, 40),
    }
    with open_checkpoint(s3_url) as checkpoint:
        counts = fetched(monkeypatch)
        restore(checkpoint, shards, "model.")
    (size,) = counts.values()
    assert size <= 64 * 1024 + large.nbytes + MATRIX.nbytes  # the first: to find the header
    left, right = shards["model.large"]  # type: ignore[misc]
    assert torch.equal(torch.cat([left.tensor, right.tensor], dim=1), large)


# --- ranks together -----------------------------------------------------------------------------


def everyone() -> LoadGroups:
    assert dist.group.WORLD is not None
    return LoadGroups(dist.group.WORLD)


def layouts(rank: int, world: int) -> dict[str, LocalTensors]:
    """Replicas, rows, interleaved columns, and a tensor that one rank alone has."""
    rows, columns = 96 // world, 40 // world
    held: dict[str, LocalTensors] = {
        "model.both": torch.zeros(96, 40),
        "model.rows": ShardedTensor(
            "model.rows", torch.zeros(rows, 40), (96, 40), (rows * rank, 0)
        ),
        "model.columns": ShardedTensor(
            "model.columns", torch.zeros(96, columns), (96, 40), (0, columns * rank)
        ),
        "model.half": torch.zeros(5, dtype=torch.bfloat16),
    }
    if rank == 1:
        held["model.mine"] = torch.zeros(3)
    return held


def stored() -> dict[str, torch.Tensor]:
    names = ("model.both", "model.rows", "model.columns")
    more = {"model.half": torch.arange(5).to(torch.bfloat16), "model.mine": torch.ones(3)}
    return {**{name: MATRIX + k for k, name in enumerate(names)}, **more}


def load_together(url: str, small: bool) -> int:
    """Bytes that this rank read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = [
        (part.name, part.offset, part.tensor)
        for name, held in sorted(layouts(rank, world).items())
        for part in slices_held(name, held)
    ]
    most = 256 if small else read_jobs.MOST_READ_BYTES
    with (
        mock.patch.multiple(read_jobs, LEAST_READ_BYTES=256, MOST_READ_BYTES=most),
        open_checkpoint(url, verify="digests") as checkpoint,
    ):
        size = shared_load.fill_together(checkpoint.files, checkpoint.locate, wanted, everyone())
    for name, offset, tensor in wanted:
        expected = stored()[name]
        for dim, begin in enumerate(offset):
            expected = expected.narrow(dim, begin, tensor.shape[dim])
        assert torch.equal(tensor, expected), (rank, name)
    return size


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world", "small"), [(2, True), (4, True), (4, False)])
def test_ranks_that_load_together_read_each_byte_once(
    ranks: RankPool, tmp_path: Path, world: int, small: bool
) -> None:
    save(str(tmp_path), stored(), shard_size_bytes=10_000)
    sizes = ranks.run(load_together, world, str(tmp_path), small)
    assert sum(sizes) == sum(tensor.nbytes for tensor in stored().values())
    if small:
        assert max(sizes) < 1.2 * sum(sizes) / world


WIDE = 1024


def load_from_a_store(url: str, environment: dict[str, str]) -> int:
    """Bytes that this rank fetched, headers included: all of one matrix, columns of another."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, columns = (WIDE, WIDE), WIDE // world
    both, part = torch.zeros(shape), torch.zeros(WIDE, columns)
    cut = ShardedTensor("model.columns", part, shape, (0, columns * rank))
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, environment):
        counts = fetched(patch)
        checkpoint = open_checkpoint(url)
        targets: dict[str, LocalTensors] = {"model.both": both, "model.columns": cut}
        restore(checkpoint, targets, "model.", share=everyone())
    assert torch.equal(both, large())
    assert torch.equal(part, large()[:, columns * rank : columns * (rank + 1)])
    return counts.total()


def large() -> torch.Tensor:
    return torch.arange(float(WIDE * WIDE)).view(WIDE, WIDE)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_fetch_a_remote_checkpoint_once_in_all(
    ranks: RankPool, s3_url: str, s3_settings: dict[str, str]
) -> None:
    save(s3_url, {"model.both": large(), "model.columns": large()})
    fetched_bytes = ranks.run(load_from_a_store, 4, s3_url, s3_settings)
    assert sum(fetched_bytes) <= 1.1 * 2 * large().nbytes
    assert max(fetched_bytes) <= 0.3 * sum(fetched_bytes)


def error_of(checkpoint: Checkpoint, held: dict[str, Any], names: Iterable[str] = ()) -> str:
    """What ranks that restore together are told."""
    try:
        restore(checkpoint, held, "model.", names, share=everyone())
    except ArtifactError as error:
        return str(error)
    return "loaded"


def load_with_a_fault(url: str) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = layouts(rank, world)
    names = {*own, "model.mine"}
    if rank == 1:
        own["model.both"] = torch.zeros(96, 41)
    return error_of(open_checkpoint(url), own, names)


@pytest.mark.distributed
def test_what_does_not_fit_one_rank_is_refused_by_all(ranks: RankPool, tmp_path: Path) -> None:
    save(str(tmp_path), stored())
    outcomes = ranks.run(load_with_a_fault, 2, str(tmp_path))
    assert outcomes[0].startswith("rank 1 failed to load")
    assert all("model.both is [96, 40], wanted [96, 41]" in outcome for outcome in outcomes)


def load_what_breaks(url: str) -> str:
    def broken(file: TensorFile, read: object, scratch: object = None) -> torch.Tensor:
        raise ArtifactError(f"{file.url}: ends too soon")

    held = torch.zeros(96, 40)
    with mock.patch.multiple(read_jobs, LEAST_READ_BYTES=1024, MOST_READ_BYTES=1024):
        hurt = mock.patch.object(TensorFile, "load", broken)
        with hurt if dist.get_rank() == 1 else nullcontext():
            return error_of(open_checkpoint(url), {"model.both": held})


@pytest.mark.distributed
def test_what_fails_on_one_rank_in_the_middle_fails_on_all(ranks: RankPool, tmp_path: Path) -> None:
    save(str(tmp_path), {"model.both": MATRIX})
    outcomes = ranks.run(load_what_breaks, 2, str(tmp_path))
    assert outcomes[0].startswith("rank 1 failed to load")
    assert all("ends too soon" in outcome for outcome in outcomes)


def load_what_is_damaged(url: str) -> tuple[str, bool]:
    held = torch.zeros(96, 40)
    error = error_of(open_checkpoint(url, verify="digests"), {"model.both": held})
    return error, bool(held.any())


@pytest.mark.distributed
def test_a_digest_that_one_rank_finds_wrong_keeps_values_from_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    save(str(tmp_path), {"model.both": MATRIX})
    path = tmp_path / "iter_0000050" / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    outcomes = ranks.run(load_what_is_damaged, 2, str(tmp_path))
    assert all(f"{path.name}: digest" in text and not filled for text, filled in outcomes)


# --- any layout to any layout -------------------------------------------------------------------


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""

SHAPES = {
    "model.a": (6, 8),
    "model.b": (5,),
    "optimizer.exp_avg.a": (6, 8),
    "optimizer.param.b": (5,),
}


@st.composite
def ways_to_cut(draw: st.DrawFn) -> dict[str, list[Box]]:
    """The boxes that each tensor is cut into, its states apart from it as with ZeRO."""
    found = {}
    for name, shape in SHAPES.items():
        cuts = [sorted({0, n, *draw(st.lists(st.integers(1, n - 1), max_size=3))}) for n in shape]
        boxes = product(*(pairwise(ends) for ends in cuts))
        found[name] = [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]
    return found


def cut(layout: dict[str, list[Box]], values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the ranks of a layout hold of these values, each in memory of its own."""
    return {
        name: [
            ShardedTensor(name, box_of(values[name], *box).clone(), SHAPES[name], box[0])
            for box in boxes
        ]
        for name, boxes in layout.items()
    }


def filled(root: str, layout: dict[str, list[Box]]) -> dict[str, Any]:
    """What the ranks of a layout hold after loading."""
    held = cut(layout, {name: torch.full(shape, 7.0) for name, shape in SHAPES.items()})
    with open_checkpoint(root) as checkpoint:
        for prefix in ("model.", "optimizer."):
            own = {name: pieces for name, pieces in held.items() if name.startswith(prefix)}
            restore(checkpoint, own, prefix)
    return held


@pytest.mark.slow
@settings(max_examples=15)
@given(ways_to_cut(), ways_to_cut())
def test_what_any_layout_saved_any_layout_loads(
    tmp_path_factory: pytest.TempPathFactory,
    ours: dict[str, list[Box]],
    theirs: dict[str, list[Box]],
) -> None:
    """Saved by ours, loaded by theirs, saved by theirs and loaded by ours, all is as it was."""
    values = {n: torch.randn(shape) for n, shape in SHAPES.items()}
    first, second = (str(tmp_path_factory.mktemp(name)) for name in ("ours", "theirs"))
    save(first, cut(ours, values), shard_size_bytes=100)
    save(second, filled(first, theirs), shard_size_bytes=100)
    right = cut(ours, values)
    for name, pieces in filled(second, ours).items():
        for piece, expected in zip(pieces, right[name], strict=True):
            assert torch.equal(piece.tensor, expected.tensor), name
