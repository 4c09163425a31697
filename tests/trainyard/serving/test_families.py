"""A model of every family that generates answers over HTTP, as the static engine does."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stages.serve.config import ServeConfig
from stages.serve.engine import build as engine_for
from tests.trainyard.inference.small_models import GPTS, MAMBAS, MORE_GPTS, T5S, VOCAB, build, run
from tests.trainyard.serving.running import loaded_of, running
from trainyard.config import from_dict
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.serving.batch_engine import BatchEngine

pytestmark = pytest.mark.slow

PROMPT, COUNT = "a small text", 6


class Letters:
    """A tokenizer by which a letter is a token."""

    vocab_size, eod = VOCAB, 0
    config = SimpleNamespace(tokenizer_type="Letters")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(VOCAB + token) for token in tokens)


@pytest.mark.parametrize("kind", [*GPTS, *MORE_GPTS, *MAMBAS, *T5S, "retro"])
def test_a_family_answers_with_the_tokens_of_the_static_engine(kind: str) -> None:
    model, tokenizer = build(kind), Letters()
    words: Any = tokenizer
    generator = replace(loaded_of(model), tokenizer=words)
    engine = engine_for(from_dict(ServeConfig, {"load": "x"}), generator)
    assert isinstance(engine, BatchEngine | DynamicEngine)
    prompt = tokenizer.encode(PROMPT)
    expected = tokenizer.decode(run(model, [prompt], COUNT).outputs[0])
    fields: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
    with running(generator, engine=engine) as server:
        reply = server.post("/v1/completions", prompt=[PROMPT, prompt], logprobs=1, **fields)
        assert reply.status_code == 200, reply.text
        for choice in reply.json()["choices"]:
            assert choice["text"] == expected
            assert len(choice["logprobs"]["token_logprobs"]) == COUNT
        with server.client.stream(
            "POST", "/v1/completions", json={"prompt": PROMPT, "stream": True, **fields}
        ) as stream:
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == expected
        answer = server.put(prompts=[PROMPT], tokens_to_generate=COUNT, top_k=1)
        assert answer.status_code == 200, answer.text
        (tokens,) = answer.json()["tokens"]
        assert tokenizer.decode(tokens[len(prompt) :]) == expected[: len(tokens) - len(prompt)]
    assert isinstance(engine, BatchEngine) == (kind in T5S)
