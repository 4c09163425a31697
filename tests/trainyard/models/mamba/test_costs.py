"""Operations and memory of hybrids: against the tensors of the model, what autograd keeps, and a
GPT."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from trainyard.models.costs import flops
from trainyard.models.costs.memory import count_parameters, shard_params
from trainyard.models.costs.memory_detail import detailed_memory, parameters_here
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.init import init_parameters
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.flops import flops_per_iteration
from trainyard.models.mamba.model import MambaModel
from trainyard.models.parallel_layout import ParallelLayout

ROWS, B = 64, 2
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "hybrid_layer_pattern": "MM*-",
    "mamba_state_dim": 16,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_backend": "torch",
    "position_embedding_type": "none",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mamba alone": {"hybrid_layer_pattern": "MMMM"},
    "gated, no biases": {"swiglu": True, "disable_bias_linear": True},
}


def build(**options: Any) -> MambaModel:
    model = MambaModel(MambaConfig(**SIZES | options), ROWS)
    init_parameters(model, 1)
    return model


@pytest.mark.parametrize("kind", [*KINDS, "rms"])
def test_every_tensor_of_the_model_is_counted(kind: str) -> None:
    model = build(**KINDS.get(kind, {"normalization": "RMSNorm"}))
    config, layout = model.config, ParallelLayout()
    tensors = sum(parameter.numel() for parameter in model.parameters())
    assert detailed_memory(config, ROWS, layout).parameters == 2 * tensors
    ends = {"has_embedding": False, "has_output": False}
    for number, layer in enumerate(model.decoder.layers.values()):
        own = sum(parameter.numel() for parameter in layer.parameters())
        assert parameters_here(config, ROWS, layout, range(number, number + 1), **ends) == own
    upstream = count_parameters(config, ROWS, layout)
    assert upstream.transformer_block + upstream.embedding == tensors
    halves = shard_params(config, ROWS, ParallelLayout(tp=2))
    assert tensors / 2 < halves < 0.52 * tensors


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_that_torch_keeps(kind: str, again: bool) -> None:
    modules = {"recompute_modules": ("core_attn", "mlp")}
    more = {"recompute_granularity": "selective", **modules} if again else {}
    model = build(**KINDS[kind] | more).bfloat16().train()
    tokens = torch.randint(ROWS, (B, SIZES["seq_length"]))
    before = {tensor.untyped_storage().data_ptr() for tensor in tensors_alive()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.loss(tokens, tokens)
    for tensor in tensors_alive():  # checkpoints hold what they begin with themselves
        pack(tensor)
    assert out.requires_grad
    kept = sum(size for place, size in sizes.items() if place not in before)
    found = detailed_memory(model.config, ROWS, ParallelLayout(micro_batch_size=B))
    assert found.activations + found.logits == pytest.approx(kept, rel=0.15)


def tensors_alive() -> list[torch.Tensor]:
    """With memory: those of a compiler, which an earlier test may have left, have none."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [found for found in gc.get_objects() if type(found) in kinds]


def test_operations_of_attention_and_mlps_alone_are_those_of_a_gpt() -> None:
    hybrid = MambaConfig(**SIZES | {"hybrid_layer_pattern": "*-*-"})
    names = ("hidden_size", "num_attention_heads", "seq_length")
    gpt = GPTConfig(num_layers=2, **{name: SIZES[name] for name in names})
    assert flops_per_iteration(hybrid, ROWS, 3) == flops.flops_per_iteration(gpt, ROWS, 3)


def test_operations_of_a_mamba_layer_are_those_of_megatron() -> None:
    """`num_floating_point_operations`, hybrid models: per token and layer forward 2 h (2 di + 2 g n
    + H) + 7 di n + 2 di h."""
    one, two = (
        flops_per_iteration(
            MambaConfig(**SIZES | {"num_layers": n, "hybrid_layer_pattern": "M" * n}), ROWS, 1
        )
        for n in (1, 2)
    )
    h, di, gn, heads, n = 64, 128, 2 * 16, 8, 16
    forward = 2 * h * (2 * di + 2 * gn + heads) + 7 * di * n + 2 * di * h
    assert two - one == 3 * 64 * forward
