"""Optimizer states of experts in the buffers of runs with several tensor, expert-tensor, expert and
pipeline ranks. Ranks are numbered as megatron-core 0.16.1 does: of the experts' optimizer those
that share an expert vary fastest, then expert-parallel ranks, then pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.torch_dist.families import MIXTRAL
from tests.trainyard.conversion.torch_dist.test_buckets import Run, found, sample, tensors
from tests.trainyard.conversion.torch_dist.torch_dist_buckets_files import laid_out, vector
from trainyard.conversion.megatron.experts import is_of_experts
from trainyard.conversion.megatron.layout import cut_of
from trainyard.conversion.megatron.names import layer_of
from trainyard.conversion.torch_dist.buckets import KINDS, check_places
from trainyard.models.moe_config import MoEConfig

NUM_EXPERTS, NUM_LAYERS, BUCKET = 4, 4, 1000
CONFIG = replace(
    MIXTRAL,
    num_layers=NUM_LAYERS,
    moe=MoEConfig(num_experts=NUM_EXPERTS, moe_ffn_hidden_size=24, moe_layer_freq="[0,0,1,1]"),
)
IN_A_LAYER = (
    *("self_attention.linear_proj", "input_layernorm", "self_attention.linear_qkv"),
    *("pre_mlp_layernorm", "mlp.router", "mlp.experts", "mlp.linear_fc1", "mlp.linear_fc2"),
)
"""Order of the modules of Transformer Engine's layer."""

Piece = tuple[str, int | None]
"""A name of ours, and which expert of it."""


@dataclass(frozen=True)
class Ranks:
    """Degrees of a run."""

    tp: int
    etp: int
    ep: int
    pp: int
    grouped: bool = True


def place(name: str) -> tuple[int, int, int, str]:
    """Where a parameter stands among the modules."""
    layer = layer_of(name)
    if layer is None:
        return (0 if name.startswith("embedding") else 2, 0, 0, name)
    rest = name.split(".", 3)[3]
    number = next(n for n, part in enumerate(IN_A_LAYER) if rest.startswith(part))
    return 1, layer, number, rest


def names_of_stage(stage: int, pp: int) -> list[str]:
    def stage_of(name: str) -> int:
        layer = layer_of(name)
        if layer is not None:
            return layer // (NUM_LAYERS // pp)
        return 0 if name.startswith("embedding") else pp - 1

    return sorted((n for n in sample(CONFIG)["param"] if stage_of(n) == stage), key=place)


def of_experts(names: list[str], numbers: range, grouped: bool) -> list[Piece]:
    """Experts of one layer, in the order of a rank's modules."""
    if grouped:
        return [(name, number) for name in names for number in numbers]
    return [(name, number) for number in numbers for name in names]


def cut(name: str, whole: Tensor, rank: int, count: int) -> Tensor:
    """A tensor rank's part."""
    kind = cut_of(name, CONFIG)
    if count == 1 or kind == "whole":
        return whole
    if kind == "columns":
        return whole.chunk(count, 1)[rank]
    if kind == "gated":
        return torch.cat([half.chunk(count, 0)[rank] for half in whole.chunk(2, 0)])
    return whole.chunk(count, 0)[rank]


def run_of(ranks: Ranks) -> Run:
    """The vectors of all ranks."""
    run: Run = {}

    def add(optimizer: str, number: int, pieces: list[Piece], rank: int, count: int) -> None:
        key = f"{optimizer}optimizer.distributed.dp_group_idx_{number}."
        key += "gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)."
        for kind in KINDS:
            states = sample(CONFIG)[kind]
            wholes = [(n, states[n] if e is None else states[n][e]) for n, e in pieces[::-1]]
            parts = [cut(name, whole, rank, count).contiguous() for name, whole in wholes]
            sizes = [(part.numel(), False) for part in parts]
            for number_of_bucket, bucket in enumerate(laid_out(sizes, BUCKET, 1)):
                run[f"{key}bucket_idx_{number_of_bucket}.{kind}"] = vector(bucket, parts, 1)

    for stage in range(ranks.pp):
        names = names_of_stage(stage, ranks.pp)
        layers = sorted({layer_of(name) or 0 for name in names if is_of_experts(name)})
        mixtures = [[n for n in names if is_of_experts(n) and layer_of(n) == i] for i in layers]
        dense: list[Piece] = []
        for name in names:
            if not is_of_experts(name):
                dense.append((name, None))
            elif ranks.ep == 1 and name in [mixture[0] for mixture in mixtures]:
                mixture = mixtures[layers.index(layer_of(name) or 0)]
                dense += of_experts(mixture, range(NUM_EXPERTS), ranks.grouped)
        chained = "chained_0." if ranks.ep > 1 and mixtures else ""
        for rank in range(ranks.tp):
            add(chained, rank + ranks.tp * stage, dense, rank, ranks.tp)
        of_a_rank = NUM_EXPERTS // ranks.ep
        for expert_rank in range(ranks.ep if ranks.ep > 1 and mixtures else 0):
            numbers = range(expert_rank * of_a_rank, (expert_rank + 1) * of_a_rank)
            own = [p for m in mixtures for p in of_experts(m, numbers, ranks.grouped)]
            for rank in range(ranks.etp):
                number = rank + ranks.etp * (expert_rank + ranks.ep * stage)
                add("chained_1.", number, own, rank, ranks.etp)
    return run


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "ranks",
    [
        Ranks(tp=2, etp=2, ep=2, pp=2, grouped=False),
        Ranks(tp=2, etp=1, ep=4, pp=4),
        Ranks(tp=2, etp=2, ep=1, pp=1),
        Ranks(tp=2, etp=1, ep=2, pp=1),
        Ranks(tp=1, etp=1, ep=2, pp=2),
        Ranks(tp=1, etp=1, ep=2, pp=4, grouped=False),
        Ranks(tp=1, etp=2, ep=2, pp=2),
    ],
    ids=str,
)
def test_states_of_experts_are_found_on_ranks_of_all_kinds(ranks: Ranks) -> None:
    """The first two layers are dense, so that a pipeline rank may have no expert."""
    args = {
        "transformer_impl": "transformer_engine",
        "tensor_model_parallel_size": ranks.tp,
        "expert_tensor_parallel_size": ranks.etp,
        "expert_model_parallel_size": ranks.ep,
        "pipeline_model_parallel_size": ranks.pp,
        "moe_grouped_gemm": ranks.grouped,
    }
    run = run_of(ranks)
    places = found(run, CONFIG, args)
    for kind in KINDS:
        for name, tensor in sample(CONFIG)[kind].items():
            assert torch.equal(places[name].read(tensors(run), kind), tensor), (kind, name)
    check_places(places, tensors(run), lambda name: sample(CONFIG)["param"][name].bfloat16())
