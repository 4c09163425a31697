"""First values: the same for every cut, and as they are asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainyard.models import init
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import draw_parameter, init_parameters
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.models.tied import EMBEDDING, is_copy, shared_embedding
from trainyard.parallel.sharding import even_shard

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "seq_length": 16,
}


def config(**changes: Any) -> GPTConfig:
    return GPTConfig(**(SMALL | changes))


def test_blocks_of_rows_are_the_whole_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, name = torch.Size((130, 48)), "decoder.layers.0.mlp.linear_fc1.weight"
    whole = draw_parameter(name, shape, config(), 1)
    plain = torch.empty(130 * 48)
    plain.normal_(0.0, 0.02, generator=init.named_generator(name, 1))
    assert torch.equal(whole.flatten(), plain)
    monkeypatch.setattr(init, "BLOCK_NUMBERS", 48 * 16)
    assert torch.equal(draw_parameter(name, shape, config(), 1), whole)


@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (0, 2), (1, 1)])
@pytest.mark.parametrize("xavier", [False, True])
def test_shards_are_slices_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dim: int, parts: int, xavier: bool
) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMBERS", 48 * 32)
    chosen, name = config(init_method_xavier_uniform=xavier), "decoder.layers.1.mlp.x.weight"
    shape = (160, 48)
    whole = draw_parameter(name, torch.Size(shape), chosen, 2)
    for rank in range(4):
        shard = even_shard(shape, dim, 4, rank, parts)
        part = torch.empty(shard.local_shape)
        init._fill(part, shard, name, chosen, 2)
        assert torch.equal(part, shard.take(whole))


@pytest.mark.parametrize("width", [48, 7])
def test_a_tokens_row_does_not_depend_on_the_padding(width: int) -> None:
    few, more = (
        draw_parameter(EMBEDDING, torch.Size((rows, width)), config(), 3) for rows in (100, 128)
    )
    assert torch.equal(few[:96], more[:96])
    if width == 48:
        assert torch.equal(few, more[:100])


def test_stages_are_parts_of_the_whole_model() -> None:
    whole = GPTModel(config(), 64)
    init_parameters(whole, 4)
    stages = [
        PipelineStage(range(0, 1), has_embedding=True, has_output=False),
        PipelineStage(range(1, 3), has_embedding=False, has_output=False),
        PipelineStage(range(3, 4), has_embedding=False, has_output=True),
    ]
    seen: set[str] = set()
    for stage in stages:
        model = GPTModel(config(), 64, pipeline_stage=stage)
        init_parameters(model, 4)
        for name, parameter in model.named_parameters():
            original = EMBEDDING if is_copy(parameter) else name
            assert torch.equal(parameter, whole.get_parameter(original))
            seen.add(original)
        shared = shared_embedding(model)
        assert (shared is not None) == (stage.has_embedding or stage.has_output)
    assert seen == {name for name, _ in whole.named_parameters()}
    assert shared_embedding(whole) is None


def test_xavier_bounds_follow_the_whole_shape() -> None:
    weight = draw_parameter(
        "decoder.layers.0.mlp.linear_fc1.weight",
        torch.Size((192, 48)),
        config(init_method_xavier_uniform=True),
        5,
    )
    bound = math.sqrt(6 / (192 + 48))
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.98 * bound


def test_embeddings_have_their_own_deviation() -> None:
    chosen = config(embedding_init_method_std=1.0)
    model = GPTModel(chosen, 256)
    init_parameters(model, 6)
    assert model.get_parameter(EMBEDDING).std().item() == pytest.approx(1.0, rel=0.05)
    weight = model.get_parameter("decoder.layers.0.mlp.linear_fc1.weight")
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_centred_norms_begin_at_nothing() -> None:
    model = GPTModel(config(apply_layernorm_1p=True), 64)
    init_parameters(model, 7)
    assert not model.get_parameter("decoder.final_layernorm.weight").any()
    plain = GPTModel(config(), 64)
    init_parameters(plain, 7)
    tokens = torch.arange(16).unsqueeze(0)
    assert torch.equal(model.eval()(tokens), plain.eval()(tokens))
