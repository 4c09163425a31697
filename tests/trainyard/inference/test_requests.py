"""Options of one request: penalties, ends, seeds, in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainyard.inference.small_models import build, decoder_of, some_prompts
from trainyard.errors import ConfigError
from trainyard.inference.config import OutputConfig, SamplingConfig
from trainyard.inference.request import Completion, Request
from trainyard.inference.sampling import Sampler, allowed_logits, keep_min_p, penalised
from trainyard.inference.static import GenerationResult, run_requests, steps_ahead

PROBABILITIES = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])


def run(requests: Sequence[Request]) -> GenerationResult:
    prompts = [request.prompt for request in requests]
    decoder = decoder_of(build("llama"), prompts, max(r.max_tokens for r in requests))
    return run_requests(decoder, requests)


def completion(made: Sequence[int], **options: Any) -> Completion:
    return Completion(Request(prompt=[0, 3], max_tokens=9, **options), tokens=list(made))


def test_every_request_gets_its_own_text_whatever_its_company() -> None:
    samplings = [
        SamplingConfig(top_k=0, temperature=1.2, seed=5),
        SamplingConfig(top_k=7, seed=5),
        SamplingConfig(),
        SamplingConfig(top_k=0, top_p=0.9, top_p_decay=0.7, top_p_bound=0.2),
        SamplingConfig(top_k=0, min_p=0.05, repetition_penalty=1.4, frequency_penalty=0.5),
    ]
    requests = [
        Request(prompt=prompt, max_tokens=12, sampling=sampling, number=i)
        for i, (prompt, sampling) in enumerate(
            zip(some_prompts(4, 9, 6, 3, 8), samplings, strict=True)
        )
    ]
    together = run(requests).outputs
    assert together == [run([request]).outputs[0] for request in requests]
    assert together == run(requests[::-1]).outputs[::-1]
    other = replace(requests[0], sampling=replace(samplings[0], seed=6))
    assert run([other]).outputs[0] != together[0]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=5, seed=3)])
def test_a_step_ahead_of_its_tokens_is_the_same(sampling: SamplingConfig) -> None:
    requests = [
        Request(prompt=prompt, max_tokens=count, sampling=sampling, number=i)
        for i, (prompt, count) in enumerate(zip(some_prompts(4, 9, 6), (5, 8, 3), strict=True))
    ]
    right = run(requests).outputs
    sampler = Sampler([Completion(request) for request in requests])
    assert sampler.is_uniform
    decoder = decoder_of(build("llama"), [r.prompt for r in requests], 8)
    with torch.inference_mode():
        logits = decoder.start([r.prompt for r in requests]).logits
        steps = [tokens for _, tokens in steps_ahead(decoder, sampler, logits)]
    assert [
        [tokens[row] for tokens in steps[:count]] for row, count in enumerate((5, 8, 3))
    ] == right


def test_min_p_keeps_what_is_near_the_likeliest() -> None:
    logits = PROBABILITIES.log()
    assert keep_min_p(logits, 0.3)[0].isfinite().nonzero().flatten().tolist() == [1, 3, 4]


def test_top_p_decays_with_the_output_down_to_its_bound() -> None:
    sampling = SamplingConfig(top_k=0, top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    found = [sampling.top_p_after(count) for count in range(4)]
    assert found == pytest.approx([0.8, 0.4, 0.3, 0.3])


def test_penalties_are_of_prompt_or_output() -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, -4.0, 1.0])
    repeated = completion([1, 1], sampling=SamplingConfig(repetition_penalty=2.0))
    assert penalised(logits, repeated).tolist() == [1.0, -4.0, 4.0, -8.0, 1.0]
    counted = SamplingConfig(presence_penalty=1.0, frequency_penalty=0.25)
    assert penalised(logits, completion([1, 1, 4], sampling=counted)).tolist() == [
        2.0,
        -3.5,
        4.0,
        -4.0,
        -0.25,
    ]


def test_an_end_comes_neither_too_early_nor_where_it_is_banned() -> None:
    logits = torch.zeros(5)
    options: dict[str, Any] = {"min_tokens": 2, "stop_ids": frozenset({4})}
    early = allowed_logits(logits, completion([1], **options))
    assert early.isinf().nonzero().flatten().tolist() == [4]
    assert allowed_logits(logits, completion([1, 2], **options)).isfinite().all()
    banned = allowed_logits(logits, completion([1], banned_after=lambda token: [token + 1]))
    assert banned.isinf().nonzero().flatten().tolist() == [2]


def test_a_minimum_of_tokens_postpones_the_end() -> None:
    (prompt,) = some_prompts(5)
    request = Request(prompt=prompt, max_tokens=12)
    free = run([request]).outputs[0]
    ended = run([replace(request, stop_ids=frozenset(free[1:2]))])
    assert ended.outputs[0] == free[: free.index(free[1]) + 1]
    assert ended.stopped == [True]
    later = run([replace(request, stop_ids=frozenset(free[1:2]), min_tokens=12)])
    assert len(later.outputs[0]) == 12
    assert free[1] not in later.outputs[0]


def test_a_text_ends_where_its_caller_says() -> None:
    (prompt,) = some_prompts(5)
    request = Request(prompt=prompt, max_tokens=12, is_stop=lambda tokens: len(tokens) == 3)
    result = run([request, replace(request, is_stop=None, max_tokens=5)])
    assert [len(output) for output in result.outputs] == [3, 5]
    assert [c.finish_reason for c in result.completions] == ["stop", "length"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"min_p": 0.5}, "--min-p 0.5 chooses among tokens"),
        ({"top_k": 0, "min_p": 1.5}, "--min-p must be in"),
        ({"top_p_decay": 0.5}, "change --top-p; give one above 0"),
        ({"top_k": 0, "top_p": 0.5, "top_p_bound": 0.6}, "--top-p-bound 0.6 is the least --top-p"),
        ({"top_k": 0, "temperature": 1e-40}, "--temperature must be 0 .greedy. or in .0.0001, 100"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty must be in"),
        ({"presence_penalty": 101.0}, "--presence-penalty must be in"),
    ],
)
def test_sampling_that_cannot_be_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingConfig(**values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"stop_words": ("a", "")}, "--stop-words contains an empty text"),
        ({"top_n_logprobs": 2}, "--top-n-logprobs is of --return-log-probs"),
        ({"return_log_probs": True, "top_n_logprobs": 2000}, "at most 1000"),
        ({"length_penalty": 2.0}, "--length-penalty is of --beam-width"),
        ({"beam_width": 2, "return_log_probs": True}, "writes the score of a text"),
        ({"beam_width": 2, "stop_on_eol": True}, "--beam-width ends texts with"),
        ({"min_tokens": -1}, "--min-tokens"),
        ({"beam_width": 100_000}, "--beam-width must be at most 1000"),
    ],
)
def test_outputs_that_cannot_be_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OutputConfig(**values)
