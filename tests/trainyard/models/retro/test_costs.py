"""Memory of a Retro against the tensors of the model, and against what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.trainyard.models.retro.small_retro import ROWS, some_neighbors, some_tokens
from trainyard.models.costs.memory import count_parameters, shard_params
from trainyard.models.costs.memory_detail import detailed_memory, parameters_here
from trainyard.models.init import init_parameters
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.model import RetroModel

B = 2
SIZES: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 64,
    "retro_chunk_length": 16,
    "retro_cross_attention_layers": (3, 6),
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "retro_encoder_hidden_dropout": 0.0,
    "retro_encoder_attention_dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated, grouped": {"swiglu": True, "group_query_attention": True, "num_query_groups": 2},
    "no biases": {"disable_bias_linear": True, "normalization": "RMSNorm"},
}


def build(**options: Any) -> RetroModel:
    model = RetroModel(RetroConfig(**(SIZES | options)), ROWS)
    init_parameters(model, 1)
    return model


def losses(model: RetroModel) -> torch.Tensor:
    tokens = some_tokens(B, length=64)
    return model.loss(tokens, tokens, neighbors=some_neighbors(model.config, B))


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_model_is_counted(kind: str) -> None:
    model = build(**KINDS[kind])
    config, layout = model.config, ParallelLayout()
    tensors = sum(parameter.numel() for parameter in model.parameters())
    assert detailed_memory(config, ROWS, layout).parameters == 2 * tensors
    ends = {"has_embedding": False, "has_output": False}
    layers = [parameters_here(config, ROWS, layout, range(n, n + 1), **ends) for n in range(6)]
    for number, layer in enumerate(model.decoder.layers.values()):
        assert layers[number] == sum(parameter.numel() for parameter in layer.parameters())
    upstream = count_parameters(config, ROWS, layout)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    learned = config.embedding_params()
    assert upstream.transformer_block + upstream.embedding == pytest.approx(
        matrices - learned, rel=0.02
    )


def test_the_stage_with_the_encoder_is_the_most_loaded() -> None:
    config = RetroConfig(**(SIZES | {"num_layers": 8, "retro_cross_attention_layers": (5, 8)}))
    found = detailed_memory(config, ROWS, ParallelLayout(pp=4, num_microbatches=8))
    assert found.stage == "3 of 4"
    whole, cut = (shard_params(config, ROWS, ParallelLayout(pp=pp)) for pp in (1, 4))
    encoder = 2 * config.layer_params()
    assert whole / 4 + 0.7 * encoder < cut < whole


@pytest.mark.parametrize("kind", ["plain", "gated, grouped"])
def test_activations_are_those_that_torch_keeps(kind: str) -> None:
    model = build(**KINDS[kind]).bfloat16().train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = losses(model)
    assert out.requires_grad
    found = detailed_memory(model.config, ROWS, ParallelLayout(micro_batch_size=B))
    assert found.activations + found.logits == pytest.approx(sum(sizes.values()), rel=0.15)


def test_full_recomputation_keeps_one_layer_with_the_encoder_at_a_time() -> None:
    again = {"recompute_granularity": "full", "recompute_method": "uniform"}
    layout = ParallelLayout(micro_batch_size=B, recompute="full")
    plain, saved = (RetroConfig(**(SIZES | more)) for more in ({}, again))
    whole = detailed_memory(plain, ROWS, ParallelLayout(micro_batch_size=B)).activations
    least = plain.equal_layers(range(2, 3)) / plain.equal_layers(range(6)) * whole
    assert least < detailed_memory(saved, ROWS, layout).activations < whole
