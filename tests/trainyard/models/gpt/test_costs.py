"""FLOPs and theoretical memory against what Megatron-LM's own programs print for six models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.models.costs.flops import flops_per_iteration, flops_per_token
from trainyard.models.costs.memory import (
    activation_memory,
    check_layout,
    count_parameters,
    full_recompute_bytes,
)
from trainyard.models.costs.memory_detail import detailed_memory
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.parallel_layout import GRADIENT_BYTES, PARAMETER_BYTES, ParallelLayout

GPT_345M = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048}
UPSTREAM_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
    "expert_tp": "expert_tensor_parallel_size",
    "micro_batch_size": "micro_batch_size",
}
"""What `ParallelLayout` calls the arguments of the upstream programs."""

every_model = pytest.mark.parametrize(
    "name",
    [
        "gpt_345m",
        "gpt_345m_tp2_pp2",
        "gpt3_175b_tp8_pp16_dp8_distopt",
        "llama2_7b",
        "llama3_8b_gqa",
        "mixtral_8x7b",
    ],
)


class Case:
    """One model as it was given to the upstream programs, and their four numbers."""

    def __init__(self, golden: Path, name: str) -> None:
        vectors = json.loads((golden / "megatron_vectors.json").read_text())
        self.numbers: dict[str, Any] = vectors["compute"][name]
        arguments = vectors["compute_base_args"] | self.numbers["args_changed"]
        known = {field.name for field in dataclasses.fields(GPTConfig)} & arguments.keys()
        routed = {field.name for field in dataclasses.fields(MoEConfig)} & arguments.keys()
        values = {key: arguments[key] for key in routed} | {
            "moe_layer_freq": str(arguments["moe_layer_freq"])
        }
        self.config = GPTConfig(
            moe=MoEConfig(**values),
            **{key: arguments[key] for key in known},
            disable_bias_linear=not arguments["add_bias_linear"],
        )
        self.vocab: int = arguments["padded_vocab_size"]
        self.layout = ParallelLayout(
            **{ours: arguments[key] for ours, key in UPSTREAM_NAMES.items()},
            sharding="optim" if arguments["use_distributed_optimizer"] else "no_shard",
        )


def test_every_model_of_the_golden_file_is_compared(golden: Path) -> None:
    vectors = json.loads((golden / "megatron_vectors.json").read_text())
    assert every_model.args[1] == list(vectors["compute"])


@every_model
def test_flops_equal_the_upstream_numbers(golden: Path, name: str) -> None:
    case = Case(golden, name)
    upstream = case.numbers["flops_per_iteration_at_global_batch_512"]
    assert flops_per_iteration(case.config, case.vocab, 512) == upstream
    per_token = flops_per_token(case.config, case.vocab)
    assert per_token * 512 * case.config.seq_length == upstream


@every_model
def test_weights_and_optimizer_equal_the_upstream_numbers(golden: Path, name: str) -> None:
    case = Case(golden, name)
    shard = count_parameters(case.config, case.vocab, case.layout).most_loaded_shard
    per_parameter = PARAMETER_BYTES + GRADIENT_BYTES + case.layout.optimizer_bytes_per_parameter
    assert shard * per_parameter == case.numbers["weight_and_optimizer_bytes"]


@every_model
def test_activations_equal_the_upstream_numbers(golden: Path, name: str) -> None:
    case = Case(golden, name)
    plain = activation_memory(case.config, case.vocab, case.layout)
    assert plain.total == case.numbers["activation_bytes_without_sp"]
    layout = dataclasses.replace(case.layout, sequence_parallel=True, recompute="selective")
    precise = activation_memory(case.config, case.vocab, layout)
    assert precise.total == case.numbers["activation_bytes_with_sp"]


def test_interleaved_schedule_costs_its_penalty() -> None:
    config = GPTConfig(**GPT_345M)
    plain = activation_memory(config, 50304, ParallelLayout(pp=4))
    interleaved = activation_memory(config, 50304, ParallelLayout(pp=4, layers_per_virtual_stage=3))
    assert interleaved.interleaved_penalty == pytest.approx(1 + 3 / (4 * 2))
    assert interleaved.in_flight_microbatches == 6
    assert interleaved.total == pytest.approx(plain.total * (1 + 3 / 8))


def test_few_microbatches_do_not_fill_the_pipeline() -> None:
    config = GPTConfig(**GPT_345M)
    full = activation_memory(config, 50304, ParallelLayout(pp=4, num_microbatches=16))
    half = activation_memory(config, 50304, ParallelLayout(pp=4, num_microbatches=2))
    assert half.total == pytest.approx(full.total / 2)
    assert half.in_flight_microbatches == 2


def test_experts_are_cut_by_expert_parallelism_only(golden: Path) -> None:
    case = Case(golden, "mixtral_8x7b")
    whole = count_parameters(case.config, case.vocab, ParallelLayout())
    cut = count_parameters(case.config, case.vocab, ParallelLayout(ep=8))
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole.most_loaded_shard - cut.most_loaded_shard == experts * 7 / 8
    assert whole.transformer_block - whole.active_transformer_block == experts * 6 / 8


def test_full_recompute_keeps_less_than_none() -> None:
    config = GPTConfig(**GPT_345M)
    layout = ParallelLayout(micro_batch_size=4)
    kept = full_recompute_bytes(config, 50304, layout)
    assert kept < activation_memory(config, 50304, layout).total / 3


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (
            ParallelLayout(pp=5),
            "num-layers .24. must be divisible by --pipeline-model-parallel-size .5.",
        ),
        (ParallelLayout(tp=3), "num-attention-heads"),
        (ParallelLayout(layers_per_virtual_stage=2), "needs --pipeline-model-parallel-size"),
        (ParallelLayout(pp=2, layers_per_virtual_stage=5), "num-layers-per-virtual-pipeline-stage"),
        (ParallelLayout(tp=0), "must be above 0"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(layout: ParallelLayout, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_layout(layout, GPTConfig(**GPT_345M))


# --- our own count ----------------------------------------------------------------------------

LLAMA_8B: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 8192,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


def test_every_way_to_save_memory_saves_some() -> None:
    def activations(layout: ParallelLayout | None = None, **changes: Any) -> float:
        config = GPTConfig(**(LLAMA_8B | changes))
        return detailed_memory(config, 128256, layout or ParallelLayout()).activations

    plain = activations()
    norms = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
    mlp = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")}
    halves = {"recompute_method": "block", "recompute_num_layers": 16}
    assert (
        plain
        > activations(**norms)
        > activations(**mlp)
        > activations(recompute_granularity="full")
    )
    assert plain > activations(recompute_granularity="full", **halves)
    assert plain > activations(cpu_offloading_num_layers=16)
    assert activations(ParallelLayout(cp=2)) == plain / 2
    assert activations(ParallelLayout(tp=2, sequence_parallel=True)) == plain / 2
    assert plain / 2 < activations(ParallelLayout(tp=2)) < plain


def test_parameters_of_all_ranks_are_those_of_the_model() -> None:
    config = GPTConfig(**LLAMA_8B)
    whole = config.num_params(128256)
    assert detailed_memory(config, 128256, ParallelLayout()).parameters == 2 * whole
    norms = 65 * 4096  # whole on every rank
    for tp in (2, 4):
        share = detailed_memory(config, 128256, ParallelLayout(tp=tp)).parameters / 2
        assert tp * (share - norms) + norms == whole
    zero = detailed_memory(config, 128256, ParallelLayout(dp=8, sharding="optim"))
    assert zero.optimizer == 12 * whole / 8
    assert zero.gradients == 4 * whole


def test_the_last_stage_carries_the_logits() -> None:
    config = GPTConfig(**(LLAMA_8B | {"seq_length": 1024}))
    memory = detailed_memory(
        config, 128256, ParallelLayout(pp=4, micro_batch_size=16, num_microbatches=1)
    )
    assert memory.stage == "last"
    assert memory.logits > 2 * 16 * 1024 * 128256
