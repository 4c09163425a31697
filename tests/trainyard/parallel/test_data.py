"""Averaged gradients over real processes, and how they are packed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainyard.errors import ConfigError
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.data import GradientBuckets, partition
from trainyard.parallel.dims import ParallelDims, dims_of
from trainyard.testing import distributed
from trainyard.testing.distributed import run_distributed


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def averaged(bucket_size: int) -> list[torch.Tensor]:
    model = small_model()
    parameters = list(model.parameters())
    buckets = GradientBuckets(parameters, dist.group.WORLD, bucket_size)
    inputs = torch.arange(24, dtype=torch.float32).view(4, 6) / 10
    for _ in range(2):  # the second step must not see the first
        buckets.zero()
        shard = inputs.chunk(dist.get_world_size())[dist.get_rank()]
        model(shard).square().mean().backward()
        buckets.reduce()
    return [p.grad.clone() for p in parameters if p.grad is not None]


@pytest.mark.distributed
def test_average_over_ranks_equals_one_process_whatever_the_buckets() -> None:
    model = small_model()
    inputs = torch.arange(24, dtype=torch.float32).view(4, 6) / 10
    model(inputs).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    many, few = (run_distributed(averaged, 2, "gloo", size) for size in (10, 10_000))
    for first, second, third, reference in zip(many[0], many[1], few[0], expected, strict=True):
        assert torch.equal(first, second), "ranks hold different gradients"
        assert torch.equal(first, third), "the size of the buckets changed the result"
        torch.testing.assert_close(first, reference)


def refuse() -> None:
    if dist.get_rank() == 1:
        raise ConfigError("--this is wrong")
    dist.barrier()


@pytest.mark.distributed
def test_the_error_of_a_rank_reaches_the_test() -> None:
    with pytest.raises(ConfigError, match="--this is wrong"):
        run_distributed(refuse, 2)


def refuse_last() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ConfigError("--this is wrong")
    time.sleep(0.5)
    raise ConnectionError("rank 1 is gone")


@pytest.mark.distributed
def test_the_error_of_a_rank_is_not_hidden_by_those_that_it_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks are looked at after both have failed, the one that lost its peer standing first."""
    slow = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(1))
    monkeypatch.setattr(distributed, "time", slow)
    with pytest.raises(ConfigError, match="--this is wrong"):
        run_distributed(refuse_last, 2)


def test_buckets_hold_every_parameter_once_last_first() -> None:
    parameters = [nn.Parameter(torch.empty(n)) for n in (5, 50, 3, 4)]
    assert [[p.numel() for p in bucket] for bucket in partition(parameters, 10)] == [
        [4, 3],
        [50],
        [5],
    ]


def test_what_is_not_there_yet_is_refused_in_words() -> None:
    for option in ("tensor", "pipeline"):
        with pytest.raises(ConfigError, match=f"--{option}-model-parallel-size 2: .* not yet"):
            ParallelConfig(**{f"{option}_model_parallel_size": 2})  # type: ignore[arg-type]


def test_all_ranks_are_data_parallel() -> None:
    assert dims_of(ParallelConfig(), 4) == ParallelDims(dp=4)
    assert ParallelDims(dp=2).world_size == 2
