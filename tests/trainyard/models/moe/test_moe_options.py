"""Options of experts that contradict each other, the model or the layout are refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainyard.models.small_gpt import SMALL
from trainyard.errors import ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.retro.config import RetroConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ExpertDims, ParallelDims, expert_dims_of

SIGMOID = {"moe_router_score_function": "sigmoid"}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 5000}, "--num-experts must be at most 4096"),
        ({"moe_router_topk": 9}, r"--moe-router-topk \(9\) must be from 1 to --num-experts \(8\)"),
        ({"moe_router_topk": 1}, "add --moe-router-pre-softmax"),
        ({"moe_apply_probs_on_input": True}, r"needs --moe-router-topk 1, which is 2"),
        ({**SIGMOID, "moe_router_pre_softmax": True}, "has no meaning with .* sigmoid"),
        ({"moe_router_enable_expert_bias": True}, "needs --moe-router-score-function sigmoid"),
        ({"moe_router_num_groups": 4}, "belong together"),
        ({**GROUPS, "moe_router_num_groups": 3}, r"\(3\) must divide --num-experts \(8\)"),
        ({**GROUPS, "moe_router_topk": 3}, r"divide --moe-router-topk \(3\)"),
        ({**GROUPS, "moe_router_topk": 6}, "at most the 2 experts of a group"),
        ({"moe_pad_expert_input_to_capacity": True}, "needs --moe-expert-capacity-factor"),
        ({"moe_shared_expert_gate": True}, "needs --moe-shared-expert-intermediate-size"),
        ({"moe_aux_loss_coeff": -1.0}, "--moe-aux-loss-coeff must be at least 0"),
        ({"moe_expert_capacity_factor": 0.0}, "--moe-expert-capacity-factor must be above 0"),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoEConfig(**{"num_experts": 8, **options})


def test_a_pattern_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives experts to no layer"):
        GPTConfig(**SMALL, moe=MoEConfig(num_experts=4, moe_layer_freq="[0]*4"))
    with pytest.raises(ConfigError, match="0 or 1 for each of --num-layers"):
        GPTConfig(**SMALL, moe=MoEConfig(num_experts=4, moe_layer_freq="[0,1]"))


def test_a_retro_has_no_experts() -> None:
    with pytest.raises(ConfigError, match="not for --model-type retro"):
        RetroConfig(**SMALL | {"seq_length": 64, "num_layers": 6}, moe=MoEConfig(num_experts=4))


@pytest.mark.parametrize(
    ("experts", "parallel", "message"),
    [
        ({}, {"expert_model_parallel_size": 3}, r"--num-experts \(8\) must be divisible"),
        (
            {"moe_ffn_hidden_size": 30},
            {"expert_tensor_parallel_size": 4},
            r"--moe-ffn-hidden-size \(30\) must be divisible by --expert-tensor",
        ),
        ({}, {"tensor_model_parallel_size": 2}, "needs --sequence-parallel"),
        (
            {"moe_shared_expert_intermediate_size": 15},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            r"--moe-shared-expert-intermediate-size \(15\)",
        ),
    ],
)
def test_degrees_that_do_not_divide_the_experts_are_refused(
    experts: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    config = GPTConfig(**SMALL, moe=MoEConfig(num_experts=8, **experts))
    with pytest.raises(ConfigError, match=message):
        config.check_parallel(ParallelConfig(**parallel))


@pytest.mark.parametrize("family", [GPTConfig, BertConfig])
def test_a_dense_model_has_no_experts_to_spread(family: Any) -> None:
    dense = family(**SMALL)
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        with pytest.raises(ConfigError, match=r"size \(2\) spreads experts .* the model has none"):
            dense.check_parallel(ParallelConfig(**{name: 2}))
        dense.check_parallel(ParallelConfig(**{name: 1}))


# --- the grid ---------------------------------------------------------------------------------


def test_the_grid_of_experts_is_megatrons() -> None:
    """etp fastest, then ep, then data parallel, within each stage."""
    dense = ParallelDims(tp=2, cp=2, dp=2, pp=2)
    parallel = ParallelConfig(expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    dims = expert_dims_of(parallel, dense)
    assert dims.stages == (tuple(range(8)), tuple(range(8, 16)))
    assert dims.group_ranks("ep")[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dims.group_ranks("dp")[:2] == [[0, 4], [1, 5]]
    assert dims.group_ranks("tp", "ep", "pp")[0] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert dims.coordinates(14) == dims.coordinates(6).__class__(tp=0, ep=2, dp=1, pp=1)


def test_as_dense_layers_the_grid_has_the_same_groups() -> None:
    dense = ParallelDims(tp=2, cp=2, dp=2, pp=2, order="tp-cp-ep-pp-dp")
    stages = tuple(map(tuple, sorted(dense.group_ranks("tp", "cp", "dp"))))
    dims = ExpertDims(stages=stages, tp=2)
    assert sorted(dims.group_ranks("tp")) == sorted(dense.group_ranks("tp"))
    assert sorted(dims.group_ranks("dp")) == sorted(dense.group_ranks("dp", "cp"))
    assert sorted(dims.group_ranks("tp", "ep", "pp")) == sorted(dense.group_ranks("tp", "pp"))


def test_ranks_that_experts_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(4\) x --expert-tensor.* must divide .* = 6"):
        expert_dims_of(ParallelConfig(expert_model_parallel_size=4), ParallelDims(dp=6))
