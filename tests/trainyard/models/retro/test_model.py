"""Retro against the equations of its paper, and what neighbours may and may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.trainyard.models.retro.reference import Reference
from tests.trainyard.models.retro.small_retro import (
    CHUNK,
    LENGTH,
    ROWS,
    SMALL_RETRO,
    build,
    some_neighbors,
    some_tokens,
)
from trainyard.errors import ConfigError
from trainyard.models.costs.flops import flops_per_iteration as flops_of_gpt
from trainyard.models.gpt.model import GPTModel
from trainyard.models.latent_config import LatentConfig
from trainyard.models.mtp_config import MTPConfig
from trainyard.models.retro.chunks import Neighbors
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.flops import flops_per_iteration
from trainyard.models.retro.model import RetroModel

KINDS: dict[str, dict[str, Any]] = {
    "two layers with neighbours": {},
    "one neighbour, one chunk": {"retro_num_neighbors": 1, "retro_num_retrieved_chunks": 1},
    "grouped queries, three layers in the encoder": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "retro_encoder_layers": 3,
        "retro_num_retrieved_chunks": 3,
        "retro_attention_gate": 0.5,
    },
}


def texts(neighbors: Neighbors, row: int) -> list[list[list[int]]]:
    """The neighbours of a row without padding."""
    return [
        [
            text[:count].tolist()
            for text, count in zip(of_chunk, counts.tolist(), strict=True)
            if count
        ]
        for of_chunk, counts in zip(neighbors.tokens[row], neighbors.lengths[row], strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_papers_equations(kind: str) -> None:
    model = build(**KINDS[kind]).double()
    tokens, neighbors = some_tokens(), some_neighbors(model.config)
    with torch.no_grad():
        found = model(tokens, neighbors=neighbors)
        for row in range(2):
            expected = Reference(model).logits(tokens[row].tolist(), texts(neighbors, row))
            torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [9, 11, 12])
def test_a_text_may_end_inside_a_chunk(length: int) -> None:
    model = build().double()
    tokens, neighbors = some_tokens()[:, :length], some_neighbors(model.config)
    first = Neighbors(neighbors.tokens[:, :2], neighbors.lengths[:, :2])
    with torch.no_grad():
        found = model(tokens, neighbors=first)
        expected = Reference(model).logits(tokens[0].tolist(), texts(first, 0))
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", range(LENGTH // CHUNK))
@torch.no_grad()
def test_a_neighbour_changes_logits_from_the_last_token_of_its_chunk_on(chunk: int) -> None:
    model, tokens = build(), some_tokens()
    neighbors = some_neighbors(model.config)
    neighbors.lengths[:, chunk] = 8
    other = neighbors.tokens.clone()
    other[:, chunk] = (other[:, chunk] + 1) % ROWS
    before = model(tokens, neighbors=neighbors)
    after = model(tokens, neighbors=Neighbors(other, neighbors.lengths))
    changed = (before != after).any(dim=2).all(dim=0)
    first = (chunk + 1) * CHUNK - 1
    assert changed.tolist() == [False] * first + [True] * (LENGTH - first)


@pytest.mark.parametrize("place", [0, 3, 4, 9, 15])
@torch.no_grad()
def test_a_token_changes_no_earlier_logits(place: int) -> None:
    model, tokens = build(), some_tokens()
    neighbors = some_neighbors(model.config)
    other = tokens.clone()
    other[:, place] = (other[:, place] + 1) % ROWS
    before, after = (model(t, neighbors=neighbors) for t in (tokens, other))
    assert torch.equal(before[:, :place], after[:, :place])
    assert (before[:, place:] != after[:, place:]).any(dim=2).all()


@torch.no_grad()
def test_without_any_neighbour_it_is_the_gpt_with_the_same_weights() -> None:
    model, tokens = build(), some_tokens()
    gpt = GPTModel(model.config, ROWS).eval()
    weights = model.state_dict()
    gpt.load_state_dict({name: weights[name] for name in gpt.state_dict()})
    neighbors = some_neighbors(model.config)
    none = Neighbors(neighbors.tokens, torch.zeros_like(neighbors.lengths))
    expected = gpt(tokens)
    assert torch.equal(model(tokens, neighbors=none), expected)
    assert torch.equal(model(tokens), expected)


def test_padding_of_neighbours_has_no_effect_and_no_gradient() -> None:
    model = build()
    tokens, neighbors = some_tokens(), some_neighbors(model.config)
    beyond = torch.arange(8) >= neighbors.lengths.unsqueeze(-1)
    losses, gradients = [], []
    for padding in (1, 63):
        padded = Neighbors(neighbors.tokens.masked_fill(beyond, padding), neighbors.lengths)
        loss = model.loss(tokens, tokens, neighbors=padded)
        model.zero_grad()
        loss.sum().backward()
        losses.append(loss)
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert torch.equal(*losses)
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert torch.isfinite(gradient).all(), name
        assert torch.equal(gradient, gradients[1][name]), name


def test_flops_are_those_of_the_matrix_products() -> None:
    model = build(attention_backend="local", retro_encoder_layers=3)
    tokens, neighbors = some_tokens(3), some_neighbors(model.config, 3)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens, neighbors=neighbors).mean().backward()
    config = model.config
    # The formula counts causal attention at half.
    half = 6.0 * 3 * LENGTH * LENGTH * config.query_size * config.num_layers
    assert flops_per_iteration(config, ROWS, 3) + half == counter.get_total_flops()
    assert flops_per_iteration(config, ROWS, 1) > flops_of_gpt(config, ROWS, 1)


def test_its_parameters_are_as_many_as_its_options_say() -> None:
    for kind in KINDS.values():
        model = build(**kind)
        assert sum(p.numel() for p in model.parameters()) == model.config.num_params(ROWS)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (6, [6]),
        (12, [6, 9, 12]),
        (15, [6, 9, 12, 15]),
        (16, [9, 12, 15]),
        (24, [9, 12, 15, 18, 21, 24]),
    ],
)
def test_cross_attention_is_where_megatron_lm_puts_it(num_layers: int, expected: list[int]) -> None:
    options = SMALL_RETRO | {"num_layers": num_layers, "retro_cross_attention_layers": ()}
    config = RetroConfig(**options)
    assert [layer + 1 for layer in config.cross_layers] == expected
    with torch.device("meta"):
        names = {name for name, _ in RetroModel(config, ROWS).named_parameters()}
    found = {n.split(".")[2] for n in names if ".cross_attention.attn.linear_q.weight" in n}
    assert found == {str(layer - 1) for layer in expected}
    assert {n.split(".")[2] for n in names if ".encoder." in n} == {str(expected[0] - 1)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retro_cross_attention_layers": ()}, "--num-layers 4: Retro's cross attention begins"),
        ({"retro_cross_attention_layers": (2, 5)}, r"layers 2 5: give layers from 1 to --num-la"),
        ({"retro_cross_attention_layers": (4, 2)}, "--retro-cross-attention-layers 4 2: give"),
        ({"seq_length": 18}, r"--seq-length \(18\) must be a multiple of --retro-ch"),
        ({"retro_num_retrieved_chunks": 5}, r"--max-position-embeddings \(16\) must be at l"),
        ({"retro_num_neighbors": 0}, "--retro-num-neighbors must be at least 1, got 0"),
        ({"retro_encoder_hidden_dropout": 1.0}, r"--retro-encoder-hidden-dropout must be in"),
        ({"cpu_offloading_num_layers": 1}, "--cpu-offloading-num-layers 1 is not for"),
        ({"mla": LatentConfig(multi_latent_attention=True)}, "--multi-latent-attention: --model-t"),
        ({"prediction": MTPConfig(mtp_num_layers=1)}, "--mtp-num-layers: --model-type retro has"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RetroConfig(**SMALL_RETRO | options)
