"""Loading by replicas of a model: each plans for itself, and they divide what all need."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.trainyard.checkpoint.samples import save
from tests.trainyard.checkpoint.test_load_parallel import MATRIX, layouts, stored
from trainyard.checkpoint import copies, shared_load
from trainyard.checkpoint.layout import LocalTensors, ShardedTensor, slices_held
from trainyard.checkpoint.load import open_checkpoint, restore
from trainyard.checkpoint.read_jobs import locate_all
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.shared_load import LoadGroups, Replicas
from trainyard.errors import ArtifactError
from trainyard.testing.pool import RankPool


def replicas() -> LoadGroups:
    """Two replicas of two ranks: 0 and 1, 2 and 3."""
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    axes = (next(made[ranks] for ranks in pair if rank in ranks) for pair in GRID)
    return LoadGroups(dist.group.WORLD, (Replicas(*axes),))


GRID = (((0, 1), (2, 3)), ((0, 2), (1, 3)))


def load_by_replicas(url: str) -> tuple[int, int]:
    """Bytes that this rank read, and the most boxes that it planned for."""
    rank = dist.get_rank()
    held = layouts(rank % 2, 2)
    quarter = ShardedTensor("model.state", torch.zeros(24, 40), (96, 40), (24 * rank, 0))
    held["model.state"] = quarter  # differs between replicas, as with ZeRO
    held["model.turned"] = torch.zeros(40, 96).t()  # not contiguous
    wanted = [
        (part.name, part.offset, part.tensor)
        for name, boxes in sorted(held.items())
        for part in slices_held(name, boxes)
    ]
    planned: list[int] = []

    def counting(requests: Any, locate: Any) -> Any:
        planned.append(sum(map(len, requests)))
        return locate_all(requests, locate)

    with (
        mock.patch.object(copies, "EXCHANGED_BYTES", 4096),
        mock.patch.object(shared_load, "locate_all", counting),
        open_checkpoint(url, verify="digests") as checkpoint,
    ):
        size = shared_load.fill_together(checkpoint.files, checkpoint.locate, wanted, replicas())
    values = {**stored(), "model.state": MATRIX + 9, "model.turned": MATRIX + 8}
    for name, offset, tensor in wanted:
        box = tuple(slice(begin, begin + n) for begin, n in zip(offset, tensor.shape, strict=True))
        assert torch.equal(tensor, values[name][box]), (rank, name)
    return size, max(planned)


@pytest.mark.slow
@pytest.mark.distributed
def test_replicas_divide_what_all_need_and_plan_only_for_themselves(
    ranks: RankPool, tmp_path: Path
) -> None:
    values = {**stored(), "model.state": MATRIX + 9, "model.turned": MATRIX + 8}
    save(str(tmp_path), values, shard_size_bytes=10_000)
    found = ranks.run(load_by_replicas, 4, str(tmp_path))
    assert sum(size for size, _ in found) == sum(tensor.nbytes for tensor in values.values())
    assert max(planned for _, planned in found) <= 6  # of the 13 boxes of a replica, of 26 in all


def load_copies_that_break(url: str) -> str:
    world = dist.group.WORLD
    assert world is not None
    held: dict[str, LocalTensors] = {
        "model.both": torch.zeros(96, 40),
        "model.rows": MATRIX.clone(),
    }

    def broken(file: TensorFile, read: object, scratch: object = None) -> torch.Tensor:
        raise ArtifactError(f"{file.url}: ends too soon")

    hurt = mock.patch.object(TensorFile, "load", broken)
    with hurt if dist.get_rank() == 1 else nullcontext():
        try:
            groups = LoadGroups(world, (Replicas(None, world),))
            restore(open_checkpoint(url), held, "model.", share=groups)
        except ArtifactError as error:
            return str(error)
    return "loaded"


@pytest.mark.distributed
def test_what_fails_in_one_replica_fails_in_all(ranks: RankPool, tmp_path: Path) -> None:
    save(str(tmp_path), {"model.both": MATRIX, "model.rows": MATRIX})
    outcomes = ranks.run(load_copies_that_break, 2, str(tmp_path))
    assert outcomes[0].startswith("rank 1 failed to load")
    assert all("ends too soon" in outcome for outcome in outcomes)
