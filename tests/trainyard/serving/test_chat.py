"""POST /v1/chat/completions, by OpenAI's own client, in the format that the tokenizer brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.trainyard.checkpoint.samples import tokenizer_files
from tests.trainyard.serving.running import NAME, Running, running
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.inference.load import ModelOnRanks

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TURNS = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def chat_server(generator: ModelOnRanks) -> Iterator[Running]:
    files = {n.removeprefix("tokenizer/"): data for n, data in tokenizer_files().items()}
    files["chat_template.jinja"] = TEMPLATE.encode()
    with running(replace(generator, tokenizer=tokenizer_of(files))) as found:
        yield found


@pytest.fixture(scope="module")
def client(chat_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def create(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": NAME, "messages": TURNS, "max_tokens": 6, "temperature": 0.0} | fields
    return client.chat.completions.create(**given)


def test_the_conversation_is_laid_out_by_the_template(client: openai.OpenAI) -> None:
    found = create(client)
    plain = client.completions.create(
        model=NAME, prompt="s:S\nu:hi\na:", max_tokens=6, temperature=0.0
    )
    assert found.choices[0].message.content == plain.choices[0].text
    assert found.choices[0].message.role == "assistant"
    assert found.usage == plain.usage
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    joined = create(client, messages=[TURNS[0], {"role": "user", "content": parts}])
    assert joined.choices[0].message.content == plain.choices[0].text


def test_a_stream_joined_is_the_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 20}
    whole = create(client, **fields)
    texts, roles = {0: "", 1: ""}, []
    for chunk in create(client, **fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant"] * 2


def test_log_probabilities_come_with_the_likeliest(client: openai.OpenAI) -> None:
    (choice,) = create(client, logprobs=True, top_logprobs=3).choices
    assert len(choice.logprobs.content) == 6
    for place in choice.logprobs.content:
        assert place.logprob == place.top_logprobs[0].logprob, "greedy takes the likeliest"
        assert len(place.top_logprobs) == 3


def test_an_answer_may_take_what_the_model_has_left(client: openai.OpenAI) -> None:
    found = create(client, max_tokens=None, extra_body={"ignore_eos": True})
    assert found.usage.total_tokens == 64
    assert create(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "owl", "content": "hu"}]}, "messages.0"),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "Input should be 'text', got 'image_url'",
    ),
    ({"messages": [{"role": "user", "content": "a" * 70}]}, "the model takes 64"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools are not supported"),
    ({"top_logprobs": 2}, "top_logprobs is of logprobs"),
    ({"max_completion_tokens": 2}, "not both"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]


def test_faults_are_bad_requests_with_a_message(client: openai.OpenAI) -> None:
    for fields, words in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, **fields)
        assert words in str(caught.value), fields


def test_a_tokenizer_without_a_format_is_told(server: Running) -> None:
    reply = server.post("/v1/chat/completions", messages=TURNS)
    assert reply.status_code == 400
    assert "no chat template" in reply.json()["error"]["message"]
