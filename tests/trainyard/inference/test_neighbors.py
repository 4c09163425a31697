"""Generation from a Retro with given neighbours: the tokens of its own logits, one by one."""

from __future__ import annotations

import pytest
import torch

from tests.trainyard.models.retro.small_retro import CHUNK, LENGTH, build, some_tokens
from trainyard.errors import ConfigError
from trainyard.inference.neighbors import generate_with_neighbors, neighbors_of_texts
from trainyard.inference.static import generate

GIVEN = [[[1, 2, 3, 4, 5], [6, 7]], [[8] * 30]]


@torch.no_grad()
def test_each_token_is_the_likeliest_after_those_before_it() -> None:
    model = build()
    prompt = some_tokens(batch=1)[0, : 2 * CHUNK + 1].tolist()
    made = generate_with_neighbors(model, prompt, GIVEN, LENGTH - len(prompt))
    text = torch.tensor([[*prompt, *made]])
    logits = model(text, neighbors=neighbors_of_texts(model, GIVEN, text.shape[1]))
    expected = logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert made == expected
    other = [[[40, 41, 42]], [[50, 51, 52, 53]]]
    assert generate_with_neighbors(model, prompt, other, LENGTH - len(prompt)) != made


def test_without_neighbours_it_is_the_generation_of_the_decoder() -> None:
    model = build()
    prompt = some_tokens(batch=1)[0, : 2 * CHUNK].tolist()
    none: list[list[list[int]]] = [[], []]
    made = generate_with_neighbors(model, prompt, none, 6)
    assert made == generate(model, [prompt], 6).outputs[0]
    assert generate_with_neighbors(model, prompt, none, 6, eod=made[1]) == made[:2]


def test_neighbours_that_the_text_or_the_model_cannot_have_are_refused() -> None:
    model = build()
    with pytest.raises(ConfigError, match="a text of 8 tokens has 2 whole chunks of 4"):
        neighbors_of_texts(model, [[[1]]] * 3, 2 * CHUNK)
    with pytest.raises(ConfigError, match="3 neighbours of a chunk were given"):
        neighbors_of_texts(model, [[[1], [2], [3]]], LENGTH)
    with pytest.raises(ConfigError, match="positions; shorten one"):
        generate_with_neighbors(model, [1] * CHUNK, [[]], LENGTH)
