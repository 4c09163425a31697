"""POST /v1/completions, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.trainyard.serving.running import NAME, Running, running
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.request import Request
from trainyard.inference.static import run_requests
from trainyard.inference.texts import build_decoder
from trainyard.serving.openai_options import encoded

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def create(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": NAME, "prompt": "the yard", "max_tokens": 6} | fields
    return client.completions.create(**given)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[int, str], Any]:
    """The texts of choices joined, and the usage."""
    texts: dict[int, str] = {}
    usage = None
    for chunk in create(client, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, usage


def test_an_event_is_one_line_for_every_reader() -> None:
    texts = ["plain", "caf\u00e9", "a\u2028b\x85c", "\U0001f600"]
    for text in texts:
        line = encoded({"text": text, "logprob": float("nan")})
        assert len(line.decode().splitlines()) == 1
        assert json.loads(line) == {"text": text, "logprob": None}


def test_the_text_is_that_of_the_static_engine(
    client: openai.OpenAI, generator: ModelOnRanks
) -> None:
    tokenizer = generator.tokenizer
    prompts = [tokenizer.encode(text) for text in ("the yard", "a")]
    decoder = build_decoder(generator, 2, 8, 6)
    stop = frozenset({generator.end_token})
    requests = [Request(prompt=p, max_tokens=6, stop_ids=stop) for p in prompts]
    expected = [tokenizer.decode(c.tokens) for c in run_requests(decoder, requests).completions]
    found = create(client, prompt=["the yard", "a"], **GREEDY)
    assert [choice.text for choice in found.choices] == expected
    by_tokens = create(client, prompt=prompts, **GREEDY)
    assert [choice.text for choice in by_tokens.choices] == expected
    assert create(client, prompt=prompts[1], **GREEDY).choices[0].text == expected[1]
    assert found.usage.prompt_tokens == 9
    assert found.usage.completion_tokens == 12
    assert {choice.finish_reason for choice in found.choices} == {"length"}


def test_a_stream_joined_is_the_text(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"prompt": ["the yard", "\xe9"], "n": 2, "seed": 4, "max_tokens": 20}
    whole = create(client, **fields)
    texts, usage = streamed(client, **fields)
    assert [texts[choice.index] for choice in whole.choices] == [c.text for c in whole.choices]
    assert usage == whole.usage
    assert len(set(texts.values())) == 4, "each choice has its own random numbers"


def test_echo_gives_prompt_and_scores(client: openai.OpenAI, generator: ModelOnRanks) -> None:
    found = create(client, prompt="\xe9 yard", echo=True, logprobs=2, max_tokens=3, **GREEDY)
    (choice,) = found.choices
    scores = choice.logprobs
    assert choice.text.startswith("\xe9 yard")
    assert scores.token_logprobs[0] is None
    assert len(scores.tokens) == len(scores.token_logprobs) == 7 + 3 == len(scores.top_logprobs)
    assert scores.text_offset[:4] == [0, 0, 1, 2], "the second byte completes a character"
    for value, top in zip(scores.token_logprobs[7:], scores.top_logprobs[7:], strict=True):
        assert value == max(top.values()), "greedy takes the likeliest"
    alone = create(client, prompt="\xe9 yard", echo=True, logprobs=2, max_tokens=0)
    assert alone.choices[0].text == "\xe9 yard"
    assert alone.choices[0].logprobs.token_logprobs == scores.token_logprobs[:7]
    assert alone.usage.completion_tokens == 0
    chunks = list(
        create(
            client, prompt="\xe9 yard", echo=True, logprobs=2, max_tokens=3, stream=True, **GREEDY
        )
    )
    joined = [value for c in chunks for value in c.choices[0].logprobs.token_logprobs]
    offsets = [value for c in chunks for value in c.choices[0].logprobs.text_offset]
    assert joined == pytest.approx(scores.token_logprobs)
    assert offsets == scores.text_offset


def test_best_of_returns_the_likeliest(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"seed": 9, "logprobs": 0, "max_tokens": 4}
    all_of_them = create(client, n=4, **fields).choices
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in all_of_them]
    best = create(client, best_of=4, **fields)
    assert best.choices[0].text == all_of_them[means.index(max(means))].text
    assert best.usage.completion_tokens == 16


def test_stop_words_end_a_text_and_are_left_out(client: openai.OpenAI) -> None:
    free = create(client, max_tokens=30, seed=3).choices[0].text
    word = next(free[i : i + 2] for i in range(5, 20) if "\ufffd" not in free[i : i + 2])
    ended = create(client, max_tokens=30, seed=3, stop=["no such text", word]).choices[0]
    assert ended.text == free[: free.index(word)]
    assert ended.finish_reason == "stop"
    assert streamed(client, max_tokens=30, seed=3, stop=[word])[0][0] == ended.text


def test_a_stop_word_that_comes_too_early_cuts_no_form_of_the_answer(
    client: openai.OpenAI,
) -> None:
    fields: dict[str, Any] = {"max_tokens": 50, "seed": 3, "extra_body": {"ignore_eos": True}}
    tokens = create(client, logprobs=0, **fields).choices[0].logprobs.tokens
    letters = [token for token in tokens if len(token) == 1 and token.isascii()]
    word = next(letter for letter in letters if letters.count(letter) > 1)
    first = tokens.index(word)
    end = tokens.index(word, first + 1)
    fields |= {"stop": [word], "extra_body": {"ignore_eos": True, "min_tokens": first + 1}}
    plain, scored = create(client, **fields), create(client, logprobs=0, **fields)
    assert word in plain.choices[0].text
    assert plain.choices[0].text == scored.choices[0].text == streamed(client, **fields)[0][0]
    assert plain.usage.completion_tokens == scored.usage.completion_tokens == end + 1


def test_extensions_change_the_text(client: openai.OpenAI, server: Running) -> None:
    greedy = create(client, **GREEDY).choices[0].text
    assert create(client, extra_body={"top_k": 1}).choices[0].text == greedy
    assert create(client, extra_body={"min_p": 1.0}).choices[0].text == greedy
    apart = create(client, frequency_penalty=2.0, max_tokens=20, **GREEDY).choices[0].text
    assert apart != create(client, max_tokens=20, **GREEDY).choices[0].text
    end = server.served.end_token
    ids = server.put(prompts=["a"], top_k=1, tokens_to_generate=6).json()["tokens"][0]
    if end not in ids:
        stopped = create(client, prompt="a", extra_body={"stop_token_ids": [ids[3]]}, **GREEDY)
        assert stopped.choices[0].finish_reason == "stop"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt: "),
    ({"prompt": [999]}, "tokens must be in"),
    ({"max_tokens": 64}, "the model takes 64 together"),
    ({"max_tokens": 0}, "give echo too"),
    ({"suffix": "b"}, "suffix is not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
    ({"best_of": 1, "n": 2}, "is less than n"),
    ({"best_of": 3, "stream": True}, "leave stream out"),
    ({"n": 129}, "at most 128"),
    ({"logprobs": 21}, "logprobs: "),
    ({"temperature": -0.1}, "temperature: "),
    ({"temperature": 1e-9}, "temperature must be 0"),
    ({"top_p": 0.0}, "top_p: "),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop: List should have at most 16 items"),
    ({"seed": -1}, "seed: "),
    ({"stream_options": {"include_usage": True}}, "stream_options is of stream"),
    ({"extra_body": {"top_k": 3}, "top_p": 0.5}, "top_k 3 and top_p 0.5"),
    ({"extra_body": {"min_tokens": 7}}, "min_tokens 7"),
    ({"extra_body": {"stop_token_ids": [999]}}, "the tokenizer has 257"),
    ({"extra_body": {"no_such": 1}}, "no_such: "),
]


def test_faults_are_bad_requests_with_a_message(client: openai.OpenAI) -> None:
    for fields, words in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, **fields)
        assert words in str(caught.value), fields
        assert caught.value.type == "invalid_request_error"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        create(client, model="gpt-5")


def test_a_full_queue_says_when_to_come_back(generator: ModelOnRanks) -> None:
    with running(generator, max_queued_requests=3) as small:
        reply = small.post("/v1/completions", prompt=["a"] * 4)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) > 0
        assert small.post("/v1/completions", prompt=["a"] * 3).status_code == 200


def test_a_request_that_takes_too_long_is_cancelled(generator: ModelOnRanks) -> None:
    with running(generator, request_timeout_seconds=1e-6) as hasty:
        assert hasty.post("/v1/completions", prompt="a").status_code == 504
        assert hasty.put(prompts=["a"], tokens_to_generate=9).status_code == 504
        events = hasty.post("/v1/completions", prompt="a", stream=True)
        assert events.status_code == 504, "before its first event a stream is a request"


def test_who_hangs_up_is_computed_no_further(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True, "n": 100}
    with server.client.stream("POST", "/v1/completions", json=body) as reply:
        line = next(line for line in reply.iter_lines() if line)
        assert json.loads(line.removeprefix("data: "))["model"] == NAME
    for _ in range(500):
        text = server.client.get("/metrics").text
        if "trainyard_requests_open 0.0" in text:
            break
    assert "trainyard_requests_open 0.0" in text
    assert server.post("/v1/completions", prompt="a").status_code == 200
