"""Two ranks save what one rank saves; the failure of one is the failure of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainyard.checkpoint.samples import save, some_tensors
from trainyard.artifacts import store
from trainyard.checkpoint.layout import ShardedTensor
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.ranks import Ranks
from trainyard.checkpoint.steps import find_steps
from trainyard.errors import InfrastructureError
from trainyard.testing.distributed import run_distributed
from trainyard.testing.pool import RankPool


def save_replicated(folder: str) -> None:
    rank = dist.get_rank()
    tensors = some_tensors()
    own = tensors.pop("rng.rank0.torch")
    tensors[f"rng.rank{rank}.torch"] = own + rank
    records = save(f"{folder}/two", tensors, ranks=Ranks(dist.group.WORLD, rank, 2))
    assert bool(records) == (rank == 0)


@pytest.mark.distributed
def test_two_ranks_write_each_tensor_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_replicated, 2, str(tmp_path))
    tensors = some_tensors()
    save(str(tmp_path / "one"), tensors)
    one, two = open_checkpoint(f"{tmp_path}/one"), open_checkpoint(f"{tmp_path}/two")
    assert set(two.names()) == {*one.names(), "rng.rank1.torch"}
    for name in one.names():
        assert torch.equal(one.read(name), two.read(name)), name
    assert torch.equal(two.read("rng.rank1.torch"), tensors["rng.rank0.torch"] + 1)
    files = [p.file for entry in two.index.values() for p in entry.pieces]
    assert {f for f in files if f.startswith("model")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert len(files) == len(two.index)
    assert one.state == two.state


def save_halves(folder: str) -> None:
    rank = dist.get_rank()
    whole = torch.arange(24.0).view(4, 6)
    rows = ShardedTensor("model.rows", whole[2 * rank : 2 * rank + 2], (4, 6), (2 * rank, 0))
    columns = ShardedTensor(
        "model.columns", whole[:, 3 * rank : 3 * rank + 3], (4, 6), (0, 3 * rank)
    )
    save(
        f"{folder}/run",
        {"model.rows": rows, "model.columns": columns, "model.both": whole},
        ranks=Ranks(dist.group.WORLD, rank, 2),
    )


@pytest.mark.distributed
def test_slices_of_two_ranks_are_one_tensor_at_rest(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_halves, 2, str(tmp_path))
    checkpoint = open_checkpoint(f"{tmp_path}/run")
    for name in ("model.rows", "model.columns", "model.both"):
        assert torch.equal(checkpoint.read(name), torch.arange(24.0).view(4, 6)), name
    assert len(checkpoint.index["model.both"].pieces) == 1


def save_with_a_full_disk(folder: str) -> None:
    rank = dist.get_rank()

    def full(operation: str, url: str) -> None:
        if rank == 1 and operation == "write":
            raise InfrastructureError(f"{url}: no space left on device")

    store.observers.append(full)
    with pytest.raises(InfrastructureError, match="no space left") as caught:
        save(f"{folder}/run", some_tensors(), ranks=Ranks(dist.group.WORLD, rank, 2))
    assert ("rank 1 failed to save" in str(caught.value)) == (rank == 0)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_failure_of_one_rank_fails_both_and_publishes_nothing(tmp_path: Path) -> None:
    run_distributed(save_with_a_full_disk, 2, "gloo", str(tmp_path))
    assert find_steps(f"{tmp_path}/run") == []


def save_and_lose_a_rank(folder: str) -> str:
    rank = dist.get_rank()

    def stop(operation: str, url: str) -> None:
        if rank == 1 and operation == "write":
            raise KeyboardInterrupt  # as SIGTERM does: it is not a failure to be told to the others

    store.observers.append(stop)
    try:
        save(f"{folder}/run", some_tensors(), ranks=Ranks(dist.group.WORLD, rank, 2))
    except KeyboardInterrupt:
        return "stopped"
    except InfrastructureError as error:
        return str(error)
    return "saved"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_leaves_in_the_middle_is_noticed_by_the_other(tmp_path: Path) -> None:
    outcomes = run_distributed(save_and_lose_a_rank, 2, "gloo", str(tmp_path))
    assert outcomes[0].startswith("a rank was lost during a save")
    assert outcomes[1] == "stopped"
    assert find_steps(f"{tmp_path}/run") == []
