"""FLOPs and theoretical memory against what Megatron-LM's own programs print for six models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.models.config import GPTConfig
from trainyard.models.flops import flops_per_iteration, flops_per_token
from trainyard.models.memory import (
    Layout,
    activation_memory,
    count_parameters,
    full_recompute_bytes,
    weight_and_optimizer_bytes,
)
from trainyard.models.moe_config import MoEConfig

GPT_345M = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048}
LLAMA = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "swiglu": True,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
}
GROUPED = {"group_query_attention": True, "num_query_groups": 8}


@dataclass(frozen=True)
class Golden:
    """One model and the four numbers of the upstream programs."""

    model: dict[str, Any]
    vocab: int
    flops: float
    weights: float
    with_sp: float
    without_sp: float
    layout: dict[str, Any] = field(default_factory=dict)
    moe: MoEConfig = field(default_factory=MoEConfig)

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(**self.model)


GOLDEN = {
    "gpt_345m": Golden(
        GPT_345M,
        50304,
        2540696493883392.0,
        6364827648.0,
        8535474176.0,
        8079242035.200001,
        {"micro_batch_size": 4},
    ),
    "gpt_345m_tp2_pp2": Golden(
        GPT_345M,
        50304,
        2540696493883392.0,
        1823459328.0,
        3431006208.0,
        4668397977.6,
        {"micro_batch_size": 4, "tp": 2, "pp": 2},
    ),
    "gpt3_175b_tp8_pp16_dp8_distopt": Golden(
        {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048},
        51200,
        1.1135326000533996e18,
        10784206080.0,
        10318020608.0,
        33400356864.0,
        {"tp": 8, "pp": 16, "dp": 8, "distributed_optimizer": True},
    ),
    "llama2_7b": Golden(
        LLAMA | {"ffn_hidden_size": 11008, "seq_length": 4096},
        32000,
        8.989167264045466e16,
        121291481088.0,
        16043245568.0,
        19494425395.2,
    ),
    "llama3_8b_gqa": Golden(
        LLAMA | GROUPED | {"ffn_hidden_size": 14336, "seq_length": 8192},
        128256,
        2.1588251104405094e17,
        144544702464.0,
        38730268672.0,
        40644762009.6,
    ),
    "mixtral_8x7b": Golden(
        LLAMA | GROUPED | {"ffn_hidden_size": 14336, "seq_length": 4096},
        32000,
        1.6715655374752973e17,
        840650268672.0,
        17788076032.0,
        19494425395.2,
        moe=MoEConfig(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=14336),
    ),
}
EXACT = {"rel": 1e-14}

every_model = pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN.keys())


@every_model
def test_flops_equal_the_upstream_numbers(golden: Golden) -> None:
    flops = flops_per_iteration(golden.config, golden.vocab, 512, golden.moe)
    assert flops == pytest.approx(golden.flops, **EXACT)
    per_token = flops_per_token(golden.config, golden.vocab, golden.moe)
    assert per_token * 512 * golden.config.seq_length == pytest.approx(golden.flops, **EXACT)


@every_model
def test_weights_and_optimizer_equal_the_upstream_numbers(golden: Golden) -> None:
    measured = weight_and_optimizer_bytes(
        golden.config, golden.vocab, Layout(**golden.layout), golden.moe
    )
    assert measured == pytest.approx(golden.weights, **EXACT)


@every_model
def test_activations_equal_the_upstream_numbers(golden: Golden) -> None:
    plain = activation_memory(golden.config, golden.vocab, Layout(**golden.layout))
    assert plain.total == pytest.approx(golden.without_sp, **EXACT)
    layout = Layout(**golden.layout, sequence_parallel=True, recompute="selective")
    precise = activation_memory(golden.config, golden.vocab, layout)
    assert precise.total == pytest.approx(golden.with_sp, **EXACT)


def test_interleaved_schedule_costs_its_penalty() -> None:
    config = GPTConfig(**GPT_345M)
    plain = activation_memory(config, 50304, Layout(pp=4))
    interleaved = activation_memory(config, 50304, Layout(pp=4, layers_per_virtual_stage=3))
    assert interleaved.interleaved_penalty == pytest.approx(1 + 3 / (4 * 2))
    assert interleaved.in_flight_microbatches == 6
    assert interleaved.total == pytest.approx(plain.total * (1 + 3 / 8))


def test_few_microbatches_do_not_fill_the_pipeline() -> None:
    config = GPTConfig(**GPT_345M)
    full = activation_memory(config, 50304, Layout(pp=4, num_microbatches=16))
    half = activation_memory(config, 50304, Layout(pp=4, num_microbatches=2))
    assert half.total == pytest.approx(full.total / 2)
    assert half.in_flight_microbatches == 2


def test_experts_are_cut_by_expert_parallelism_only() -> None:
    golden = GOLDEN["mixtral_8x7b"]
    whole = count_parameters(golden.config, golden.vocab, Layout(), golden.moe)
    cut = count_parameters(golden.config, golden.vocab, Layout(ep=8), golden.moe)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole.most_loaded_shard - cut.most_loaded_shard == experts * 7 / 8
    assert whole.transformer_block - whole.active_transformer_block == experts * 6 / 8


def test_full_recompute_keeps_less_than_none() -> None:
    config = GPTConfig(**GPT_345M)
    layout = Layout(micro_batch_size=4)
    kept = full_recompute_bytes(config, 50304, layout)
    assert kept < activation_memory(config, 50304, layout).total / 3


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (Layout(pp=5), "num-layers .24. must be divisible by --pipeline-model-parallel-size .5."),
        (Layout(tp=3), "num-attention-heads"),
        (Layout(layers_per_virtual_stage=2), "needs --pipeline-model-parallel-size"),
        (Layout(pp=2, layers_per_virtual_stage=5), "num-layers-per-virtual-pipeline-stage"),
        (Layout(tp=0), "must be above 0"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(layout: Layout, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        layout.check(GPTConfig(**GPT_345M))
