"""Cached generation against the full forward pass, alone against in company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainyard.inference.small_models import MORE_GPTS
from tests.trainyard.inference.small_models import build as build_small
from trainyard.errors import ConfigError
from trainyard.inference.config import SamplingConfig
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.kv_cache import StaticKVCache
from trainyard.inference.padded import PaddedDecoder
from trainyard.inference.request import Request
from trainyard.inference.static import generate, run_requests
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters

VOCAB = 64
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
KINDS: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA, "llama 4": MORE_GPTS["llama 4"]}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def build(**changes: Any) -> GPTModel:
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=48,
        init_method_std=0.2,
        **changes,
    )
    model = GPTModel(config, VOCAB)
    init_parameters(model, 3)
    return model.eval()


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy_without_cache(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@every_kind
def test_cached_logits_equal_the_full_forward_pass(kind: dict[str, Any]) -> None:
    model = build(**kind)
    tokens = torch.tensor(prompts_of(20, 20))
    cache = StaticKVCache(model.config, 2, 20)
    pieces = []
    with torch.no_grad():
        full = model(tokens)
        for piece in tokens.split([7, 1, 1, 5, 6], dim=1):
            cache.begin([piece.shape[1]] * 2)
            pieces.append(model(piece, kv_cache=cache))
            cache.advance()
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, **ROUNDING)


@every_kind
def test_ragged_rows_equal_each_row_alone(kind: dict[str, Any]) -> None:
    model, prompts = build(**kind), prompts_of(3, 17, 9)
    result = generate(model, prompts, 12)
    for prompt, output in zip(prompts, result.outputs, strict=True):
        assert output == greedy_without_cache(model, prompt, 12)


def test_a_sampled_prompt_does_not_depend_on_its_batch() -> None:
    model, prompts = build(), prompts_of(5, 11, 2, 8)
    sampling = SamplingConfig(top_k=0, temperature=1.5, seed=9)
    together = generate(model, prompts, 16, sampling=sampling).outputs
    halves = [
        generate(model, prompts[at : at + 2], 16, sampling=sampling, first_request=at).outputs
        for at in (0, 2)
    ]
    assert halves[0] + halves[1] == together
    other = generate(model, prompts, 16, sampling=SamplingConfig(top_k=0, temperature=1.5, seed=10))
    assert other.outputs != together


def test_generation_stops_at_the_end_of_document() -> None:
    model, prompts = build(), prompts_of(4, 6)
    free = generate(model, prompts, 10)
    eod = free.outputs[0][3]
    result = generate(model, prompts, 10, eod=eod)
    for index in range(2):
        expected = free.outputs[index]
        if eod in expected:
            expected = expected[: expected.index(eod) + 1]
        assert result.outputs[index] == expected
        assert result.stopped[index] == (eod in expected)
    longest = max(len(output) for output in result.outputs)
    assert len(result.step_seconds) == longest


def test_steps_are_timed_by_the_callers_clock() -> None:
    ticks = iter(range(100))
    result = generate(build(), prompts_of(4), 5, clock=lambda: float(next(ticks)))
    assert result.step_seconds == [1.0] * 5
    assert result.seconds_per_token(0) == [1.0] * 5


def test_generate_with_a_vocabulary_size_never_chooses_padding() -> None:
    model, prompts = build(), prompts_of(4, 4)
    result = generate(model, prompts, 30, vocab_size=8)
    assert max(max(output) for output in result.outputs) < 8


def test_a_model_with_a_true_vocabulary_size_never_generates_padding() -> None:
    model = build()
    limited = GPTModel(model.config, VOCAB, true_vocab_size=8)
    limited.load_state_dict(model.state_dict())
    for sampling in (SamplingConfig(), SamplingConfig(top_k=0, temperature=100.0)):
        free = generate(model, prompts_of(4, 4), 30, sampling=sampling)
        assert max(map(max, free.outputs)) >= 8, "it would be chosen"
        found = generate(limited.eval(), prompts_of(4, 4), 30, sampling=sampling)
        assert max(map(max, found.outputs)) < 8


def test_cache_reports_its_memory() -> None:
    cache = StaticKVCache(build(**LLAMA).config, 3, 10, dtype=torch.bfloat16)
    assert cache.size_bytes == 2 * 2 * 3 * 2 * 10 * 8 * 2
    assert cache.capacity == 10


@pytest.mark.parametrize(
    ("prompts", "new", "named"),
    [
        ([], 4, "--prompts"),
        ([[1], []], 4, "prompt 1 has no tokens"),
        ([[1]], 0, "--num-tokens-to-generate"),
        ([[1], [1] * 40], 9, "prompt 1 of 40 tokens .* make 49, and the model has 48"),
    ],
)
def test_impossible_requests_are_refused(prompts: list[list[int]], new: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        generate(build(), prompts, new)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_compiled_step_generates_the_same(kind: str) -> None:
    model, prompts = build_small(kind), prompts_of(3, 9, 5)
    assert isinstance(model, GPTModel)
    requests = [Request(prompt=p, max_tokens=6, number=i) for i, p in enumerate(prompts)]
    decoder = CachedDecoder(model.requires_grad_(False), 3, 15, compiled=True)
    expected = generate(model, prompts, 6).outputs
    assert run_requests(decoder, requests).outputs == expected
    assert run_requests(decoder, requests).outputs == expected, "a next batch"
    fewer = run_requests(PaddedDecoder(decoder, 3), requests[:2])
    assert fewer.outputs == expected[:2]
