"""POST /v1/retro/completions: the tokens of the function, and a sentence for what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainyard.models.retro.small_retro import CHUNK, ROWS, some_tokens
from tests.trainyard.models.retro.small_retro import build as build_retro
from tests.trainyard.serving.running import Running, loaded_of, running
from trainyard.inference.neighbors import generate_with_neighbors
from trainyard.models.retro.model import RetroModel

pytestmark = pytest.mark.slow

PATH = "/v1/retro/completions"
TEXTS = [["abcde", "fg"], ["h" * 30]]
COUNT = 6


class Letters:
    """A tokenizer of the model's 64 tokens, by which a letter is a token."""

    vocab_size, eod = ROWS, 0
    config = SimpleNamespace(tokenizer_type="Letters")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % ROWS for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(64 + token) for token in tokens)


@pytest.fixture(scope="module")
def model() -> RetroModel:
    return build_retro(seq_length=48)


@pytest.fixture(scope="module")
def retro(model: RetroModel) -> Iterator[Running]:
    tokenizer: Any = Letters()
    with running(replace(loaded_of(model), tokenizer=tokenizer)) as found:
        yield found


PROMPT = some_tokens(batch=1)[0, : 2 * CHUNK + 1].tolist()


def test_it_gives_the_tokens_of_the_function(retro: Running, model: RetroModel) -> None:
    tokens = [[Letters().encode(text) for text in chunk] for chunk in TEXTS]
    made = generate_with_neighbors(model, PROMPT, tokens, COUNT, eod=0)
    found = []
    for neighbors in (TEXTS, tokens):
        fields = {"prompt": PROMPT, "neighbors": neighbors, "max_tokens": COUNT}
        reply = retro.post(PATH, **fields, temperature=0.0)
        assert reply.status_code == 200, reply.text
        found.append(reply.json())
    for document in found:
        (choice,) = document["choices"]
        is_ended = made[-1] == 0
        assert choice["tokens"] == made
        assert choice["text"] == Letters().decode(made[:-1] if is_ended else made)
        assert choice["finish_reason"] == ("stop" if is_ended else "length")
        assert document["usage"]["total_tokens"] == len(PROMPT) + len(made)


def test_other_neighbours_give_another_text(retro: Running, model: RetroModel) -> None:
    def texts_of(neighbors: list[list[str]], **options: Any) -> list[int]:
        fields = {"prompt": PROMPT, "neighbors": neighbors, "max_tokens": COUNT}
        reply = retro.post(PATH, **fields, **options)
        tokens: list[int] = reply.json()["choices"][0]["tokens"]
        return tokens

    assert texts_of(TEXTS, temperature=0.0) != texts_of([["zzzz"], ["yyy"]], temperature=0.0)
    assert texts_of(TEXTS, seed=3) == texts_of(TEXTS, seed=3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"neighbors": [["a"]] * 3}, "a text of 9 tokens has 2 whole chunks of 4"),
        ({"neighbors": [["a", "b", "c"]]}, "3 neighbours of a chunk were given"),
        ({"neighbors": []}, "neighbors: "),
        ({"neighbors": [[[ROWS]]]}, "neighbors: tokens must be in"),
        ({"max_tokens": 40}, "the prompt has 9 tokens and 40 are to be generated"),
        ({"stream": True}, "stream: "),
        ({"model": "other"}, "the model 'other' is not served here"),
    ],
)
def test_what_cannot_be_is_said(retro: Running, fields: dict[str, Any], words: str) -> None:
    reply = retro.post(PATH, **({"prompt": PROMPT, "neighbors": TEXTS} | fields))
    assert reply.status_code in (400, 404)
    assert words in reply.json()["error"]["message"]


def test_a_gpt_is_refused_in_a_sentence(server: Running) -> None:
    reply = server.post(PATH, prompt="the yard", neighbors=[["a"]])
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        f"{PATH} is for a Retro, and tiny is a gpt, which has no neighbours; put contexts in the "
        "prompt of /v1/completions"
    )
