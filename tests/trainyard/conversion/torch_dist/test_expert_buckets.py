"""Finding optimizer states of experts in the buckets of Megatron's buffers. The orders of modules
are those of named_parameters() in megatron-core 0.16.1."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.torch_dist.families import MIXTRAL, PREDICTING
from tests.trainyard.conversion.torch_dist.test_buckets import Run, found, sample, tensors
from tests.trainyard.conversion.torch_dist.torch_dist_buckets_files import laid_out, vector
from trainyard.conversion.megatron.optimizer import Unknown
from trainyard.conversion.torch_dist.buckets import KINDS, check_places
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.moe_config import MoEConfig

SHARED = MoEConfig(
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)
CONFIG = replace(MIXTRAL, num_layers=1, moe=SHARED)
LAYER = "decoder.layers.0."
ATTENTION = {
    "transformer_engine": ("self_attention.linear_proj", "input_layernorm"),
    "local": ("input_layernorm", "self_attention.linear_proj"),
}
FC1, FC2 = (f"{LAYER}mlp.experts.linear_fc{n}.weight" for n in (1, 2))
AROUND = (
    *("mlp.router", "experts", "mlp.shared_experts.gate_weight"),
    *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)


def modules(impl: str) -> list[str]:
    """Our names in the order of the modules, `experts` for those of all experts."""
    inside = (*ATTENTION[impl], "self_attention.linear_qkv", "pre_mlp_layernorm", *AROUND)
    names = [f"{LAYER}{name}" for name in inside]
    ends = "decoder.final_layernorm", "output_layer"
    found = ["embedding.word_embeddings", *names, *ends]
    return [n if n.endswith(("experts", "gate_weight")) else f"{n}.weight" for n in found]


def experts(grouped: bool, count: int) -> list[tuple[str, int]]:
    """(our name, expert) in the order of a rank's modules."""
    if grouped:
        return [(name, expert) for name in (FC1, FC2) for expert in range(count)]
    return [(name, expert) for expert in range(count) for name in (FC1, FC2)]


@cache
def run_of(impl: str, ep: int, grouped: bool = False, size: int = 1000) -> Run:
    """The vectors of all ranks. size: numbers after which a bucket is closed."""
    states = sample(CONFIG)
    count = 4 // ep
    run: Run = {}

    def add(prefix: str, rank: int, parts: dict[str, list[Tensor]]) -> None:
        key = f"{prefix}optimizer.distributed.dp_group_idx_{rank}."
        key += "gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)."
        sizes = [(tensor.numel(), False) for tensor in parts["param"]]
        for number, bucket in enumerate(laid_out(sizes, size, 1)):
            for kind in KINDS:
                run[f"{key}bucket_idx_{number}.{kind}"] = vector(bucket, parts[kind], 1)

    def parts_of(order: list[tuple[str, int | None]]) -> dict[str, list[Tensor]]:
        return {
            kind: [
                states[kind][name] if expert is None else states[kind][name][expert]
                for name, expert in reversed(order)
            ]
            for kind in KINDS
        }

    dense: list[tuple[str, int | None]] = []
    for name in modules(impl):
        if name.endswith(".experts"):
            dense += experts(grouped, 4) if ep == 1 else []
        else:
            dense.append((name, None))
    add("" if ep == 1 else "chained_0.", 0, parts_of(dense))
    for rank in range(ep) if ep > 1 else ():
        mine = [(name, expert + rank * count) for name, expert in experts(grouped, count)]
        add("chained_1.", rank, parts_of(list(mine)))
    return run


def arguments(impl: str, ep: int, **changes: Any) -> dict[str, Any]:
    return {
        "transformer_impl": impl,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": ep,
        **changes,
    }


def weight(name: str) -> Tensor:
    return sample(CONFIG)["param"][name].bfloat16()


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize(
    ("impl", "grouped"),
    [("local", False), ("transformer_engine", False), ("transformer_engine", True)],
)
def test_states_of_every_expert_are_found(impl: str, grouped: bool, ep: int) -> None:
    run = run_of(impl, ep, grouped)
    places = found(run, CONFIG, arguments(impl, ep, moe_grouped_gemm=grouped))
    for kind in KINDS:
        for name, tensor in sample(CONFIG)[kind].items():
            assert torch.equal(places[name].read(tensors(run), kind), tensor), name
    check_places(places, tensors(run), weight)


def test_another_order_of_experts_is_detected_by_their_weights() -> None:
    """Their sizes come out if all are in one bucket."""
    run = run_of("transformer_engine", 2, size=100_000)
    places = found(run, CONFIG, arguments("transformer_engine", 2, moe_grouped_gemm=True))
    with pytest.raises(Unknown, match=r"copy of decoder.layers.0.mlp.experts.linear_fc\d.weight"):
        check_places(places, tensors(run), weight)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (CONFIG, {"expert_model_parallel_size": 1}, "would end at|no bucket is left"),
        (
            CONFIG,
            {"expert_model_parallel_size": 4},
            "buffers of 2 ranks for experts, but its args say etp 1, ep 4, pp 1",
        ),
        (CONFIG, {"expert_tensor_parallel_size": 2**20}, "etp 1048576, ep 2"),
        (CONFIG, {"expert_model_parallel_size": 3}, "3 expert-parallel ranks"),
        (
            CONFIG,
            {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 1},
            "2 ranks share an expert and 1 the other matrices",
        ),
        (PREDICTING, {}, "multi-token prediction"),
    ],
)
def test_args_of_another_run_say_why(
    config: GPTConfig, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unknown, match=words):
        found(run_of("local", 2), config, arguments("local", 2, **changes))
