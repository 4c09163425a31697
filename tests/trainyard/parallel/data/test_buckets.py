"""Where parameters lie in flat memory: laws of the layout, and Megatron-LM's numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainyard.errors import ConfigError
from trainyard.parallel.data.buckets import ALIGNMENT, plan_buckets, shard_multiple
from trainyard.parallel.data.buffers import Member, build_buckets
from trainyard.parallel.data_config import DataParallelConfig


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=30),
    st.none() | st.integers(1, 2000),
    st.sampled_from([1, 2, 3, 4, 6, 8, 96]),
    st.sets(st.integers(0, 29)),
)
def test_every_parameter_lies_once_aligned_and_in_reverse(
    sizes: list[int], bucket_size: int | None, num_shards: int, alone: set[int]
) -> None:
    multiple = shard_multiple(num_shards)
    plans = plan_buckets(sizes, bucket_size=bucket_size, multiple=multiple, alone=alone)
    held = [slot.index for plan in plans for slot in plan.slots]
    assert held == list(reversed(range(len(sizes))))
    for plan in plans:
        assert plan.size % multiple == 0
        assert plan.size // num_shards * num_shards == plan.size
        end = 0
        for slot in plan.slots:
            assert slot.start % ALIGNMENT == 0
            assert slot.start >= end
            assert slot.stop - slot.start == sizes[slot.index]
            end = slot.stop
        assert end <= plan.size
        if any(slot.index in alone for slot in plan.slots):
            assert len(plan.slots) == 1


def test_a_bucket_is_full_once_it_holds_the_size() -> None:
    plans = plan_buckets([64, 640, 192, 64], bucket_size=200)
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[3, 2], [1], [0]]
    assert [plan.size for plan in plans] == [256, 640, 64]


def test_parameters_become_views_that_keep_their_values() -> None:
    torch.manual_seed(0)
    named = list(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7)).named_parameters())
    before = [parameter.detach().clone() for _, parameter in named]
    members = [Member(*pair) for pair in named]
    (bucket,) = build_buckets(members, grad_dtype=None, bucket_size=None, multiple=ALIGNMENT)
    for (_, parameter), value in zip(named, before, strict=True):
        assert torch.equal(parameter, value)
    bucket.params.zero_()
    assert not any(parameter.any() for _, parameter in named)


def test_types_lie_apart() -> None:
    members = [
        Member(str(i), nn.Parameter(torch.ones(4, dtype=dtype)))
        for i, dtype in enumerate([torch.bfloat16, torch.float32, torch.bfloat16])
    ]
    buckets = build_buckets(members, grad_dtype=torch.float32, bucket_size=None, multiple=64)
    names = [[place.member.name for place in bucket.places] for bucket in buckets]
    assert names == [["1"], ["2", "0"]], "the one that backward completes first comes first"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ddp_bucket_size": 0}, "--ddp-bucket-size must be at least 1"),
        ({"ddp_bucket_size": 5, "ddp_num_buckets": 5}, "not both"),
        ({"overlap_param_gather": True}, "--use-distributed-optimizer"),
        ({"ddp_pad_buckets_for_high_nccl_busbw": True}, "--use-distributed-optimizer"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataParallelConfig(**options)  # type: ignore[arg-type]


def test_the_size_of_buckets_is_megatrons() -> None:
    assert DataParallelConfig().bucket_size(10**9, 8) is None
    assert DataParallelConfig(overlap_grad_reduce=True).bucket_size(10**9, 8) == 40_000_000
    assert DataParallelConfig(overlap_grad_reduce=True).bucket_size(10**9, 64) == 64_000_000
    assert DataParallelConfig(ddp_num_buckets=3).bucket_size(10, 2) == 4
