"""Groups over real processes: the right ranks, made once, and how joining fails."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ports import free_port
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import (
    ALONE,
    ProcessGroups,
    broadcast_object,
    build_groups,
    process_groups,
)
from trainyard.parallel.invariant_dropout import of_sequence_part
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.sharding import mark_partial_grad
from trainyard.parallel.tensor.gradients import reduce_partial_gradients
from trainyard.testing.distributed import run_distributed
from trainyard.testing.pool import RankPool

AXES_OF = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "model": ("tp", "pp"),
}


def members(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def group_of(dims: ParallelDims, rank: int, *axes: str) -> list[int]:
    return next(ranks for ranks in dims.group_ranks(*axes) if rank in ranks)


def check_groups(sizes: dict[str, Any]) -> None:
    dims, rank = ParallelDims(**sizes), dist.get_rank()
    groups = build_groups(dims, rank)
    for name, axes in AXES_OF.items():
        assert members(getattr(groups, name)) == group_of(dims, rank, *axes), name
    pipeline = group_of(dims, rank, "pp")
    is_end = rank in (pipeline[0], pipeline[-1])
    if dims.pp > 1:
        assert members(groups.embedding) == ([pipeline[0], pipeline[-1]] if is_end else [rank])
    total = torch.ones(())
    for name in (*AXES_OF, "embedding", "world"):
        group = getattr(groups, name)
        if group is not None:
            dist.all_reduce(total.fill_(1.0), group=group)
            assert total.item() == dist.get_world_size(group)
    if dims.cp == 1:
        assert groups.dp_cp is groups.dp
    assert broadcast_object(rank if groups.tp_rank == 0 else None, groups.tp) == min(
        group_of(dims, rank, "tp")
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 4},
        {"tp": 2, "dp": 2},
        {"tp": 2, "pp": 2, "dp": 2},
        {"tp": 2, "pp": 2, "dp": 2, "order": "tp-cp-ep-pp-dp"},
        {"cp": 2, "pp": 4, "order": "pp-cp-tp-ep-dp"},
        {"tp": 2, "cp": 2, "dp": 2},
        {"pp": 3},
    ],
)
def test_every_rank_talks_to_the_ranks_of_its_groups(
    ranks: RankPool, sizes: dict[str, Any]
) -> None:
    ranks.run(check_groups, ParallelDims(**sizes).world_size, sizes)


def test_one_rank_alone_has_no_groups() -> None:
    assert build_groups(ParallelDims(), 0) == ALONE
    assert ALONE.is_last_stage
    assert ALONE.model_parallel(ParallelConfig()) == ModelParallel()


# --- partial gradients ------------------------------------------------------------------------


def check_partial() -> None:
    rank = dist.get_rank()
    parallel = ModelParallel(tp=dist.group.WORLD, sequence_parallel=True)
    shapes, dtypes = [(3,), (2, 2), (4,), (5,)], [torch.float32] * 3 + [torch.bfloat16]
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(rank + 10 * index))
        if index != 1:
            mark_partial_grad(parameter)
    frozen = nn.Parameter(torch.zeros(2))
    mark_partial_grad(frozen)
    reduce_partial_gradients([*parameters, frozen], parallel)
    size = dist.get_world_size()
    for index, parameter in enumerate(parameters):
        summed = sum(other + 10 * index for other in range(size))
        expected = rank + 10 * index if index == 1 else summed
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, float(expected)))
    assert of_sequence_part(torch.arange(8), parallel).tolist() == list(
        range(rank * 8 // size, (rank + 1) * 8 // size)
    )


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [2, 4])
def test_partial_gradients_are_added_up_and_others_left(ranks: RankPool, tp: int) -> None:
    ranks.run(check_partial, tp)


# --- joining ----------------------------------------------------------------------------------


def launched(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def join(**options: Any) -> ProcessGroups:
    with process_groups(ParallelConfig(**options), torch.device("cpu")) as groups:
        return groups


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(InfrastructureError, match=f"MASTER_PORT {port} is in use"):
            join(distributed_timeout_minutes=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "minutes", "words"),
    [
        (1, 0.03, "rank 1 of 2 did not find .*:{port}: is rank 0"),
        (0, 0.02, "not all of 2 ranks came .*1/2 clients"),
    ],
)
def test_missing_ranks_are_named(
    rank: int, minutes: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    launched(monkeypatch, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(InfrastructureError, match=words.format(port=port)):
        join(distributed_timeout_minutes=minutes)


def test_ranks_without_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK=0, WORLD_SIZE=2)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT not set"):
        join()


def test_nccl_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(ConfigError, match="--distributed-backend nccl needs CUDA"):
        join(distributed_backend="nccl")


def join_as(port: int, degrees: list[int]) -> str:
    rank = int(os.environ["RANK"])
    dist.destroy_process_group()  # the harness's own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = ParallelConfig(
        tensor_model_parallel_size=degrees[rank], distributed_timeout_minutes=0.5
    )
    try:
        with process_groups(config, torch.device("cpu")) as groups:
            text = groups.dims.describe()
    except ConfigError as error:
        text = str(error)
    except InfrastructureError:
        text = "lost"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return text


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_join_by_the_environment() -> None:
    assert run_distributed(join_as, 2, "gloo", free_port(), [2, 2]) == ["tp=2 cp=1 dp=1 pp=1"] * 2


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_other_degrees_are_refused() -> None:
    for told in run_distributed(join_as, 2, "gloo", free_port(), [1, 2]):
        assert "rank 1 was started with --distributed-backend gloo, degrees tp=2" in told
