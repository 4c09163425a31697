"""The grid of ranks: a bijection, cut into groups, equal to Megatron-LM's documented examples."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, permutations

import pytest

from trainyard.errors import ConfigError
from trainyard.parallel.config import AXES, PIPELINE_BEFORE_DATA, ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.dims import ParallelDims, dims_of, expert_dims_of
from trainyard.parallel.shard_groups import copies_of, shards_of

ORDERS = ["-".join(axes) for axes in permutations(AXES)]


@pytest.mark.parametrize("order", ORDERS[::7])
def test_ranks_and_coordinates_are_one_to_one(order: str) -> None:
    dims = ParallelDims(tp=2, cp=3, ep=1, dp=2, pp=4, order=order)
    places = [dims.coordinates(rank) for rank in range(dims.world_size)]
    assert len(set(places)) == dims.world_size == 48
    for rank, at in enumerate(places):
        assert dims.rank_of(tp=at.tp, cp=at.cp, ep=at.ep, dp=at.dp, pp=at.pp) == rank


@pytest.mark.parametrize("order", ORDERS[::11])
def test_every_rank_is_in_exactly_one_group_of_each_kind(order: str) -> None:
    dims = ParallelDims(tp=2, cp=2, ep=2, dp=3, pp=2, order=order)
    for axes in chain.from_iterable(combinations(AXES, n) for n in range(1, 6)):
        groups = dims.group_ranks(*axes)
        assert sorted(chain.from_iterable(groups)) == list(range(dims.world_size))
        for ranks in groups:
            assert ranks == sorted(ranks)
            places = [dims.coordinates(rank) for rank in ranks]
            fixed = {tuple(getattr(at, axis) for axis in AXES if axis not in axes) for at in places}
            assert len(fixed) == 1


def test_sixteen_gpus_as_megatron_documents_them() -> None:
    """`initialize_model_parallel`: tensor 2, pipeline 4 on 16 GPUs g0 ... g15."""
    dims = dims_of(ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=4), 16)
    assert dims == ParallelDims(tp=2, pp=4, dp=2)
    assert dims.group_ranks("dp") == [
        *([0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15])
    ]
    assert dims.group_ranks("tp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert dims.group_ranks("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert dims.group_ranks("tp", "pp") == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]


def test_tp_pp_dp_mapping_puts_pipeline_neighbours_next_to_each_other() -> None:
    config = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True
    )
    dims = dims_of(config, 8)
    assert dims.order == PIPELINE_BEFORE_DATA
    assert dims.group_ranks("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.group_ranks("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_context_parallel_ranks_lie_between_tensor_and_data() -> None:
    """As Megatron-LM's docs have it for 8 GPUs with tp 2 and cp 2."""
    dims = ParallelDims(tp=2, cp=2, dp=2)
    assert dims.group_ranks("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.group_ranks("dp", "cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_numbers_of_ranks_that_do_not_fit_are_refused_with_the_nearest_that_do() -> None:
    config = ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"24 ranks .* \(8\) x .* \(2\).* = 16 .*16 or 32 ranks"):
        dims_of(config, 24)
    with pytest.raises(ConfigError, match=r"1 rank does not fit .* start 16 ranks"):
        dims_of(config, 1)


def test_instances_must_divide_the_ranks_that_share_something() -> None:
    data = DataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=4)
    config = ParallelConfig(data_parallel=data)
    assert dims_of(config, 8).dp == 8
    with pytest.raises(
        ConfigError, match=r"optimizer-instances \(4\) must divide .* = 6; .* 3 or 6"
    ):
        dims_of(config, 6)
    experts = replace(config, expert_model_parallel_size=4)
    with pytest.raises(ConfigError, match=r"instances \(4\) must divide .* of experts = 2"):
        expert_dims_of(experts, dims_of(experts, 8))


def test_each_instance_has_neighbours_and_a_copy_of_each_shard() -> None:
    """As Megatron-LM's groups: an instance is a run of the ranks of a data-parallel group."""
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert shards_of(groups, 2) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert copies_of(groups, 2) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert shards_of(groups, 1) == groups
    assert copies_of(groups, 1) == [[rank] for group in groups for rank in group]


def test_degrees_and_orders_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="the tp size must be at least 1, got 0"):
        ParallelDims(tp=0)
    with pytest.raises(ConfigError, match="rank order tp-dp must name each"):
        ParallelDims(order="tp-dp")
