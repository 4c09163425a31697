"""FLOPs and memory of a T5 against what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from trainyard.models.costs.memory import activation_memory, count_parameters
from trainyard.models.costs.memory_detail import detailed_memory, parameters_here
from trainyard.models.init import init_parameters
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.flops import flops_per_iteration
from trainyard.models.t5.model import T5Model

ROWS, B = 64, 2
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "decoder_num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "seq_length": 64,
    "decoder_seq_length": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated, grouped": {"geglu": True, "group_query_attention": True, "num_query_groups": 2},
}


def batch() -> dict[str, torch.Tensor]:
    texts = {"text_enc": 64, "enc_mask": 64, "text_dec": 16, "labels": 16}
    return {name: torch.ones(B, length, dtype=torch.long) for name, length in texts.items()}


def build(**options: Any) -> T5Model:
    model = T5Model(T5Config(**(SIZES | options)), ROWS)
    init_parameters(model, 1)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    model = build(**KINDS[kind], attention_backend="unfused")
    with FlopCounterMode(display=False) as counter:
        model.forward_step(None, batch())
    config = model.config
    # torch counts all scores of the decoder's own attention, of which half are causal.
    unseen = 2 * B * config.decoder_layers * config.decoder_length**2 * config.query_size
    counted = counter.get_total_flops() - unseen
    assert flops_per_iteration(config, ROWS, B) == pytest.approx(3 * counted)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_counted(kind: str) -> None:
    config = T5Config(**(SIZES | KINDS[kind]))
    layout = ParallelLayout()
    assert detailed_memory(config, ROWS, layout).parameters == 2 * config.num_params(ROWS)
    ends = {"has_embedding": False, "has_output": False}
    layers = [parameters_here(config, ROWS, layout, range(n, n + 1), **ends) for n in range(5)]
    assert sum(layers) == config.all_layer_params()
    assert layers[3] - layers[0] == config.cross_params()
    upstream = count_parameters(config, ROWS, layout).most_loaded_shard
    assert upstream == pytest.approx(config.num_params(ROWS), rel=0.1)


def test_activations_are_those_that_torch_keeps() -> None:
    model = build(num_layers=6, decoder_num_layers=6).bfloat16().train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.forward_step(None, batch())
    assert out.requires_grad
    layout = ParallelLayout(micro_batch_size=B)
    found = detailed_memory(model.config, ROWS, layout)
    assert found.activations + found.logits == pytest.approx(sum(sizes.values()), rel=0.15)


def test_the_first_stage_of_a_pipeline_has_layers_of_the_encoder() -> None:
    config = T5Config(**(SIZES | {"decoder_num_layers": 3}))
    alone, cut = (activation_memory(config, ROWS, ParallelLayout(pp=pp)) for pp in (1, 2))
    assert cut.total > 0.9 * alone.total
    assert detailed_memory(config, ROWS, ParallelLayout(pp=2)).stage in ("first", "last")
