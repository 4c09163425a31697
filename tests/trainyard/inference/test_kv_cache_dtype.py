"""A cache of 8 bits holds the nearest keys and values, and the texts are those of rounded ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.inference.small_models import build, some_prompts
from trainyard.errors import ConfigError
from trainyard.fp8.weights import E4M3
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.request import Request
from trainyard.inference.static import GenerationResult, run_requests
from trainyard.inference.texts import build_decoder
from trainyard.testing.tolerances import FP32_SUM_ORDER

PROMPTS, COUNT = some_prompts(3, 12, 7), 8
NEAR = 0.25
"""Nats of a log-probability, at weights as large as those of the small models."""


def generated(decoder: CachedDecoder, prompts: list[list[int]]) -> GenerationResult:
    requests = [
        Request(prompt=p, max_tokens=COUNT, number=i, log_probs=True) for i, p in enumerate(prompts)
    ]
    return run_requests(decoder, requests)


def log_probs(result: GenerationResult) -> Tensor:
    return torch.tensor([completion.log_probs for completion in result.completions])


def rounds_first(decoder: CachedDecoder) -> CachedDecoder:
    """The same decoder, which rounds keys and values before it keeps them as they are."""
    extend = decoder.cache.extend

    def rounding(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        near = (x.clamp(-448.0, 448.0).to(E4M3).to(x.dtype) for x in (k, v))
        return extend(layer, *near)

    decoder.cache.extend = rounding  # type: ignore[method-assign]
    return decoder


@pytest.mark.parametrize("family", ["gpt", "llama", "mistral"])
def test_a_cache_of_8_bits_gives_the_texts_of_rounded_keys(family: str) -> None:
    model: Any = build(family)
    exact, small, rounded = (
        CachedDecoder(model, len(PROMPTS), 24, kv_dtype=kept) for kept in (None, E4M3, None)
    )
    assert 4 * small.cache_bytes == exact.cache_bytes
    found, expected = generated(small, PROMPTS), generated(rounds_first(rounded), PROMPTS)
    assert found.outputs == expected.outputs
    torch.testing.assert_close(log_probs(found), log_probs(expected), **FP32_SUM_ORDER)
    alone = [generated(CachedDecoder(model, 1, 24, kv_dtype=E4M3), [p]) for p in PROMPTS]
    assert [result.outputs[0] for result in alone] == found.outputs
    first = log_probs(generated(exact, PROMPTS))[:, 0] - log_probs(found)[:, 0]
    assert 0.0 < float(first.abs().max()) < NEAR


def test_rows_of_a_cache_of_8_bits_are_reordered() -> None:
    decoder = CachedDecoder(build("llama"), 2, 8, kv_dtype=E4M3)
    k = torch.tensor([1e6, -3.0]).view(2, 1, 1, 1).expand(2, 2, 3, 8)
    decoder.cache.extend(0, k, -k)
    decoder.cache.reorder([1, 0])
    keys, values = decoder.cache.extend(0, k, k)
    assert keys[0].eq(448.0).all(), "the new ones, where the lengths say that they begin"
    assert values[1].eq(-3.0).all()


def test_a_t5_has_no_cache_of_8_bits() -> None:
    generator: Any = SimpleNamespace(
        model=None, tokenizer=SimpleNamespace(vocab_size=8), config=SimpleNamespace(model_type="t5")
    )
    with pytest.raises(ConfigError, match="--kv-cache-dtype is not for a t5"):
        build_decoder(generator, 1, 4, 4, kv_dtype=E4M3)
