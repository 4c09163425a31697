"""PUT /api: every documented field has its effect, and every fault its message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainyard.serving.running import Running, running
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.prompts import prompt_tokens
from trainyard.inference.request import Request
from trainyard.inference.static import run_requests
from trainyard.inference.texts import build_decoder
from trainyard.serving.config import DefaultsConfig

pytestmark = pytest.mark.slow

GREEDY = {"top_k": 1}


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    reply = server.put(**({"prompts": ["the yard"], "tokens_to_generate": 6} | fields))
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_a_prompt_is_continued_as_the_engine_does_it(
    server: Running, generator: ModelOnRanks
) -> None:
    prompt = prompt_tokens(generator.tokenizer, "the yard")
    request = Request(prompt=prompt, max_tokens=6, log_probs=True, prompt_log_probs=True)
    decoder = build_decoder(generator, 1, len(prompt), 6)
    (expected,) = run_requests(decoder, [request]).completions
    found = ask(server, **GREEDY, logprobs=True)
    assert found["tokens"] == [[*prompt, *expected.tokens]]
    decode = generator.tokenizer.decode
    assert found["text"] == ["the yard" + decode(expected.tokens)]
    assert found["segments"] == [[decode([token]) for token in found["tokens"][0]]]
    scores = [*expected.prompt_log_probs, *expected.log_probs]
    assert found["logprobs"][0] == pytest.approx(scores, rel=1e-5)


def test_a_prompt_can_be_scored_alone(server: Running) -> None:
    found = ask(server, tokens_to_generate=0, logprobs=True)
    assert found["text"] == ["the yard"]
    assert len(found["logprobs"][0]) == 7


def test_a_seed_gives_the_same_texts_and_none_gives_others(server: Running) -> None:
    seeded = [ask(server, prompts=["a", "a"], random_seed=5)["text"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert seeded[0][0] != seeded[0][1], "each prompt has its own random numbers"
    free = {ask(server)["text"][0] for _ in range(3)}
    assert len(free) == 3


def test_sampling_fields_change_what_is_drawn(server: Running) -> None:
    greedy = ask(server, **GREEDY)["text"]
    assert ask(server, temperature=0.001, random_seed=1)["text"] == greedy
    assert ask(server, top_p=1e-6, random_seed=1)["text"] == greedy
    assert ask(server, top_p=0.9, random_seed=1)["text"] != greedy
    falling = {"top_p": 0.999, "top_p_decay": 1e-6, "random_seed": 1}
    tokens = ask(server, **falling)["tokens"][0]
    first = len("the yard") + 1
    prompt = server.served.tokenizer.decode(tokens[:first])
    if "\ufffd" not in prompt:
        then = ask(server, prompts=[prompt], tokens_to_generate=5, **GREEDY)["tokens"][0]
        assert tokens == then, "after the first token one is left"
    bounded = ask(server, **falling, top_p_bound=0.999)["tokens"]
    assert bounded == ask(server, top_p=0.999, random_seed=1)["tokens"]


def test_a_stop_token_ends_a_text_and_is_left_out_of_it(server: Running) -> None:
    free = ask(server, **GREEDY)["tokens"][0]
    stop = free[10]
    ended = ask(server, **GREEDY, stop_token=stop)
    begin = free.index(stop, 8)
    assert ended["tokens"][0] == free[: begin + 1]
    assert ended["text"][0] == server.served.tokenizer.decode(free[:begin])


def test_lines_end_texts(server: Running, generator: ModelOnRanks) -> None:
    (newline,) = generator.tokenizer.encode("\n")
    count = 52
    for seed in range(200):
        found = ask(server, random_seed=seed, tokens_to_generate=count)["tokens"][0]
        if newline in found[8:]:
            break
    ended = ask(server, random_seed=seed, tokens_to_generate=count, stop_on_eol=True)
    assert ended["tokens"][0] == found[: found.index(newline) + 1]
    doubled = ask(server, random_seed=seed, tokens_to_generate=count, stop_on_double_eol=True)
    assert len(doubled["tokens"][0]) > len(ended["tokens"][0])


def test_no_line_ends_behind_a_colon(server: Running, generator: ModelOnRanks) -> None:
    (newline,) = generator.tokenizer.encode("\n")
    drawn = {"prompts": ["a:"] * 100, "tokens_to_generate": 1, "temperature": 100.0}

    def firsts(**fields: Any) -> set[int]:
        return {row[-1] for row in ask(server, **drawn, **fields)["tokens"]}

    seed = next(seed for seed in range(30) if newline in firsts(random_seed=seed))
    assert newline not in firsts(random_seed=seed, prevent_newline_after_colon=True)


def test_the_first_token_of_documents_comes_on_request(server: Running) -> None:
    assert ask(server, prompts=[""], add_BOS=True)["tokens"][0][0] == server.served.end_token
    assert ask(server, add_BOS=True)["tokens"][0][0] == server.served.end_token


def test_beams_come_the_best_first(server: Running) -> None:
    found = ask(server, beam_width=3, length_penalty=0.5)
    assert len(found["text"]) == 3 == len(found["scores"])
    assert found["scores"] == sorted(found["scores"], reverse=True)
    assert found["text"][0].startswith("the yard")


def test_what_a_request_leaves_out_comes_from_the_server(generator: ModelOnRanks) -> None:
    with running(generator, defaults=DefaultsConfig(top_k=1, seed=3)) as greedy:
        assert len({ask(greedy)["text"][0] for _ in range(2)}) == 1
        assert ask(greedy, top_k=0)["text"] != ask(greedy)["text"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompts": None}, "prompts: "),
    ({"prompts": "a"}, "prompts: "),
    ({"prompts": []}, "prompts: "),
    ({"prompts": [1]}, r"prompts.0: "),
    ({"prompts": ["a"] * 129}, "at most 128"),
    ({"prompts": [""]}, "empty prompts need add_BOS"),
    ({"max_len": 3}, "give tokens_to_generate"),
    ({"sentences": ["a"]}, "give prompts"),
    ({"tokens_to_generate": -1}, "tokens_to_generate: "),
    ({"tokens_to_generate": True}, "tokens_to_generate: "),
    ({"tokens_to_generate": 0}, "give logprobs too"),
    ({"tokens_to_generate": 64}, "the model takes 64"),
    ({"logprobs": 1}, "logprobs: "),
    ({"temperature": 0}, "temperature: "),
    ({"temperature": 100.5}, "temperature: "),
    ({"temperature": "hot"}, "temperature: "),
    ({"top_k": 1001}, "top_k: "),
    ({"top_k": 1.5}, "top_k: "),
    ({"top_p": 1.5}, "top_p: "),
    ({"top_p": 0.5, "top_k": 3}, "exclude each other"),
    ({"top_p_decay": 0.5}, "give that too"),
    ({"top_p": 0.5, "top_p_bound": 0.7}, "lower it"),
    ({"add_BOS": "yes"}, "add_BOS: "),
    ({"random_seed": -1}, "random_seed: "),
    ({"stop_token": 999}, "the tokenizer has 257"),
    ({"length_penalty": 0.5}, "of beam_width"),
    ({"beam_width": 0}, "beam_width: "),
    ({"beam_width": 2, "prompts": ["a", "b"]}, "one prompt at a time"),
    ({"beam_width": 2, "logprobs": True}, "leave stop_on_eol"),
    ({"no_such_field": 1}, "no_such_field: "),
]


def test_faults_get_status_400_and_a_message(server: Running) -> None:
    for fields, words in REFUSED:
        reply = server.put(**({"prompts": ["the yard"]} | fields))
        assert reply.status_code == 400, fields
        assert words in reply.json()["message"], (fields, reply.text)
