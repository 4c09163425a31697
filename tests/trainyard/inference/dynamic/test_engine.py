"""The dynamic engine = the static one, token for token in fp32, in any company and order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.small_models import (
    GPTS,
    MAMBAS,
    MORE_GPTS,
    VOCAB,
    build,
    decoder_of,
    full_logits,
    run,
    some_prompts,
)
from trainyard.errors import ConfigError
from trainyard.fp8.weights import E4M3
from trainyard.inference.config import SamplingConfig
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.sizes import cache_sizes
from trainyard.inference.request import BrokenOutputError, Completion, Request
from trainyard.inference.static import run_requests
from trainyard.parallel.groups import ALONE
from trainyard.testing.tolerances import BF16_LOG_PROBS, FP32_SUM_ORDER, relative_error

KINDS = (*GPTS, *MORE_GPTS, *MAMBAS, "retro")
SAMPLED: dict[str, Any] = {
    "sampling": SamplingConfig(top_k=0, temperature=1.3),
    "log_probs": True,
    "prompt_log_probs": True,
    "top_n": 2,
}


def check_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.finish_reason == other.finish_reason
        for name in ("log_probs", "prompt_log_probs"):
            mine, theirs = (torch.tensor(getattr(x, name)) for x in (one, other))
            torch.testing.assert_close(mine, theirs, **FP32_SUM_ORDER)
        for name in ("top", "prompt_top"):
            mine, theirs = (
                [[token for token, _ in place] for place in getattr(x, name)] for x in (one, other)
            )
            assert mine == theirs


FAST = {("llama", "greedy"), ("gpt-oss", "sampled"), ("hybrid", "sampled")}
CASES = [
    pytest.param(kind, name, marks=() if (kind, name) in FAST else pytest.mark.slow)
    for kind in KINDS
    for name in ("greedy", "sampled")
]


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_the_dynamic_engine_makes_the_texts_of_the_static_one(kind: str, how: str) -> None:
    model: Any = build(kind)
    prompts, options = some_prompts(3, 9, 5), {} if how == "greedy" else SAMPLED
    expected = run(model, prompts, 12, **options).completions
    engine = build_engine(model, num_blocks=9, max_requests=3, max_tokens=7)
    check_same(run_all(engine, requests_of(prompts, 12, **options)), expected)
    assert engine.stats().preemptions > 0 or kind == "mamba", "only blocks without keys are free"
    assert engine.stats().prompt_tokens == sum(map(len, prompts))
    assert engine.stats().generated_tokens == 3 * 12


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("deepseek", "gpt-oss"))]
)
def test_keys_of_8_bits_give_the_texts_of_the_static_engine_with_such(kind: str) -> None:
    model: Any = build(kind)
    requests = requests_of(some_prompts(3, 9, 5), 12, log_probs=True)
    decoder = CachedDecoder(model, 3, 21, kv_dtype=E4M3)
    expected = run_requests(decoder, requests).completions
    engine = build_engine(model, num_blocks=9, max_requests=3, max_tokens=7, kv_cache_dtype="fp8")
    check_same(run_all(engine, requests), expected)
    plain = run_all(build_engine(model), requests)
    assert [c.log_probs for c in plain] != [c.log_probs for c in expected]


def test_twice_as_many_blocks_of_8_bits_fit() -> None:
    model: Any = build("llama").to(torch.bfloat16)
    options: dict[str, Any] = {"inference_dynamic_batching_buffer_size_gb": 0.01}
    wide, narrow = (
        cache_sizes(model, DynamicConfig(**options, kv_cache_dtype=kept), ALONE, 48)[0]
        for kept in (None, "fp8")
    )
    assert abs(narrow - 2 * wide) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"), [*(("llama", n) for n in range(6)), *(("hybrid", n) for n in range(3))]
)
def test_no_setting_changes_a_text(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    model: Any = build(kind)
    prompts = some_prompts(*(draw.randint(1, 30) for _ in range(7)))
    prompts += [prompts[0] + [5], prompts[1], prompts[1] + [3, 4]]
    options = draw.choice([{}, SAMPLED])
    expected = run(model, prompts, 12, **options).completions
    for _ in range(8):
        block_size = draw.choice([1, 2, 4, 8])
        requests = draw.randint(1, 10)
        engine = build_engine(
            model,
            block_size=block_size,
            num_blocks=draw.randint(-(-44 // block_size), 200 // block_size),
            max_requests=requests,
            max_tokens=draw.randint(requests, 60),
            num_speculative_tokens=0 if kind in MAMBAS else draw.choice([0, 0, 3]),
            disable_prefix_caching=draw.random() < 0.3,
            disable_chunked_prefill=draw.random() < 0.3,
        )
        order = draw.sample(range(len(prompts)), len(prompts))
        asked = requests_of(prompts, 12, **options)
        found = run_all(engine, [asked[i] for i in order], arrive_every=draw.randint(0, 3))
        check_same(found, [expected[i] for i in order])


def test_a_known_beginning_is_not_computed_again() -> None:
    model: Any = build("llama")
    (shared,) = some_prompts(16)
    prompts = [[*shared, token] for token in (3, 4)]
    expected = run(model, prompts, 4).outputs
    engine = build_engine(model)
    assert [run_all(engine, requests_of([p], 4))[0].tokens for p in prompts] == expected
    assert engine.stats().cached_prompt_tokens == 16
    engine = build_engine(model, disable_prefix_caching=True)
    assert [run_all(engine, requests_of([p], 4))[0].tokens for p in prompts] == expected
    assert engine.stats().cached_prompt_tokens == 0


def test_a_block_spares_no_computation_of_a_state() -> None:
    model: Any = build("hybrid")
    (prompt,) = some_prompts(16)
    engine = build_engine(model)
    texts = [run_all(engine, requests_of([prompt], 4))[0].tokens for _ in range(2)]
    assert texts == run(model, [prompt, prompt], 4).outputs
    assert engine.stats().cached_prompt_tokens == 0


def test_guesses_spare_steps_and_change_no_text() -> None:
    model: Any = build("gpt")
    prompts = [[5, 6, 7] * 4, *some_prompts(9)]
    for options in ({}, {"sampling": SamplingConfig(top_k=0, temperature=0.2)}):
        steps, texts = {}, {}
        for guesses in (0, 4):
            engine = build_engine(model, num_speculative_tokens=guesses)
            for request in requests_of(prompts, 16, **options):
                engine.add(request)
            done, steps[guesses] = {}, 0
            while engine.has_work():
                steps[guesses] += 1
                done |= {u.number: u.completion.tokens for u in engine.step()}
            texts[guesses] = done
        assert texts[4] == texts[0]
        assert steps[4] < steps[0]


def test_requests_of_all_kinds_share_a_step() -> None:
    model: Any = build("gpt")
    (prompt,) = some_prompts(6)
    free = run(model, [prompt], 10).outputs[0]
    variants: list[dict[str, Any]] = [
        {},
        {"stop_ids": frozenset({free[2]})},
        {"stop_ids": frozenset({free[2]}), "min_tokens": 5},
        {"is_stop": lambda tokens: len(tokens) == 4},
        {"sampling": SamplingConfig(repetition_penalty=1.5, frequency_penalty=0.5)},
        {"sampling": SamplingConfig(top_k=0, top_p=0.9, top_p_decay=0.8), "log_probs": True},
        {"sampling": SamplingConfig(top_k=5, seed=3), "prompt_log_probs": True},
        {"banned_after": lambda token: [free[0]]},
    ]
    requests = [
        replace(Request(prompt=prompt, max_tokens=10, number=i), **v)
        for i, v in enumerate(variants)
    ]
    alone = [
        run_requests(decoder_of(model, [prompt], 10), [request]).completions[0]
        for request in requests
    ]
    check_same(run_all(build_engine(model, num_speculative_tokens=2), requests), alone)


def test_a_prompt_is_scored_without_a_new_token() -> None:
    model: Any = build("gpt")
    (prompt,) = some_prompts(9)
    scored = {"prompt_log_probs": True, "top_n": 1}
    (expected,) = run(model, [prompt], 1, **scored).completions
    (found,) = run_all(build_engine(model), requests_of([prompt], 0, **scored))
    assert (found.tokens, found.finish_reason) == ([], "length")
    assert found.prompt_log_probs == pytest.approx(expected.prompt_log_probs, rel=1e-4)


def test_a_cancelled_request_frees_what_it_holds_and_the_others_go_on() -> None:
    model: Any = build("gpt")
    prompts = some_prompts(9, 5, 7)
    expected = run(model, prompts, 8).outputs
    engine = build_engine(model, max_requests=2)
    numbers = [engine.add(request) for request in requests_of(prompts, 8)]
    engine.step()
    for number in (numbers[0], numbers[0], 99):  # one that runs, one that is gone, an unknown one
        engine.cancel(number)
    texts = {}
    while engine.has_work():
        texts |= {u.number: u.completion.tokens for u in engine.step()}
    assert texts == {numbers[1]: expected[1], numbers[2]: expected[2]}
    engine.cancel(engine.add(requests_of(prompts, 8)[0]))
    assert not engine.has_work()
    assert engine.step() == []
    assert engine.stats().blocks_used == 0


def test_urgent_requests_end_first() -> None:
    model: Any = build("gpt")
    prompts = some_prompts(9, 9, 9)
    engine = build_engine(model, max_requests=1)
    for request, priority in zip(requests_of(prompts, 3), (1, 2, 0), strict=True):
        engine.add(request, priority=priority)
    ended: list[int] = []
    while engine.has_work():
        ended += [u.number for u in engine.step() if u.completion.is_done]
    assert ended == [2, 0, 1]


def test_bf16_serves_what_a_static_batch_of_one_does_nearly_always() -> None:
    model: Any = build("llama").to(torch.bfloat16)
    prompts = some_prompts(3, 17, 9)
    options = {"log_probs": True}
    found = run_all(build_engine(model), requests_of(prompts, 8, **options))
    for completion in found:
        logits = full_logits(model, completion.request.prompt, completion.tokens)[:-1].float()
        losses = functional.cross_entropy(logits, torch.tensor(completion.tokens), reduction="none")
        assert relative_error(torch.tensor(completion.log_probs), -losses) < BF16_LOG_PROBS


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=[], max_tokens=3), "the prompt has no tokens"),
        (Request(prompt=[1] * 40, max_tokens=9), "40 tokens and 9 new ones make 49, and the engin"),
        (Request(prompt=[1, VOCAB], max_tokens=1), f"token {VOCAB}, and the model knows tokens 0"),
        (Request(prompt=[-1], max_tokens=1), "the prompt has token -1"),
    ],
)
def test_a_request_that_could_never_run_is_refused(request_: Request, message: str) -> None:
    engine = build_engine(build("gpt"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        engine.add(request_)
    assert not engine.has_work()


def test_a_request_longer_than_the_cache_is_refused() -> None:
    engine = build_engine(build("gpt"), num_blocks=3)  # type: ignore[arg-type]
    assert engine.max_tokens == 12
    with pytest.raises(ConfigError, match="make 13, and the engine has room for 12"):
        engine.add(Request(prompt=[1], max_tokens=12))
    assert len(run_all(engine, [Request(prompt=[1], max_tokens=11)])[0].tokens) == 11


@pytest.mark.parametrize("kind", ["mistral", "hybrid"])
def test_a_step_padded_to_a_fixed_number_of_requests_changes_no_text(kind: str) -> None:
    model: Any = build(kind)
    prompts = some_prompts(3, 9, 5)
    expected = run(model, prompts, 8, **SAMPLED).completions
    engine = build_engine(model, max_requests=9, inference_dynamic_batching_num_cuda_graphs=2)
    check_same(run_all(engine, requests_of(prompts, 8, **SAMPLED)), expected)


BAD = 7
"""A token whose embedding is NaN."""


def broken_model(kind: str = "llama") -> Any:
    model: Any = build(kind)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[BAD] = torch.nan
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("llama", SAMPLED), ("hybrid", {})],
    ids=["greedy", "sampled", "with states"],
)
def test_a_text_whose_logits_are_nan_ends_alone_and_leaves_nothing_behind(
    kind: str, options: dict[str, Any]
) -> None:
    """Its blocks and its slot included, which others take over as it left them."""
    good = [[t for t in prompt if t != BAD] for prompt in some_prompts(3, 9, 5)]
    bad = [*good[0], 3, BAD, 4]
    expected = run(build(kind), good, 6, **options).completions
    engine = build_engine(broken_model(kind), num_blocks=12, max_requests=2, max_tokens=7)
    for _ in range(2):
        first, last = requests_of([bad, bad], 6, **options)
        found = run_all(engine, [first, *requests_of(good, 6, **options), last])
        assert [one.is_broken for one in found] == [True, False, False, False, True]
        assert found[0].tokens == found[0].log_probs == []
        check_same(found[1:4], expected)


def test_the_static_engine_says_that_a_text_broke() -> None:
    with pytest.raises(BrokenOutputError, match="computes NaN or infinite logits for this text"):
        run(broken_model(), [[3, 4], [BAD]], 4)
