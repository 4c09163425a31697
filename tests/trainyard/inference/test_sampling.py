"""Which tokens may be chosen, and how often each is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainyard.errors import ConfigError
from trainyard.inference.config import SamplingConfig
from trainyard.inference.request import NO_TOKEN
from trainyard.inference.sampling import (
    choose_tokens,
    draw,
    draw_uniforms,
    filtered_logits,
    keep_top_k,
    keep_top_p,
    request_generators,
)

PROBABILITIES = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])
LOGITS = PROBABILITIES.log()


def kept(logits: torch.Tensor) -> list[int]:
    return logits[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_top_k_keeps_the_likeliest(k: int, expected: list[int]) -> None:
    assert kept(keep_top_k(LOGITS, k)) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.01, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [1, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_token_that_crosses_the_bound(p: float, expected: list[int]) -> None:
    assert kept(keep_top_p(LOGITS, p)) == expected


def test_top_p_filters_each_row_separately() -> None:
    both = torch.cat((LOGITS, LOGITS.flip(1)))
    out = keep_top_p(both, 0.5)
    assert kept(out[:1]) == [1, 3]
    assert kept(out[1:]) == [1, 3]
    assert torch.equal(out[0], out[1].flip(0))


def test_temperature_applies_before_top_k_and_top_p() -> None:
    sharp = filtered_logits(LOGITS, SamplingConfig(temperature=0.1, top_k=0, top_p=0.6))
    flat = filtered_logits(LOGITS, SamplingConfig(temperature=10.0, top_k=0, top_p=0.6))
    assert kept(sharp) == [1]
    assert len(kept(flat)) > 2


def test_greedy_needs_no_random_numbers() -> None:
    assert choose_tokens(LOGITS, SamplingConfig(), None).tolist() == [1]
    cold = SamplingConfig(temperature=0.0, top_k=0)
    assert choose_tokens(LOGITS, cold, None).tolist() == [1]


def test_draws_follow_the_distribution() -> None:
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    chosen = draw(LOGITS.expand(10_000, -1), uniforms)
    counts = torch.bincount(chosen, minlength=5) / 10_000
    torch.testing.assert_close(counts, PROBABILITIES[0], atol=2e-4, rtol=0)


def test_the_ends_of_the_interval_give_an_allowed_token() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits.expand(2, -1), ends).tolist() == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "how", [{"top_k": 1}, {"top_k": 0}, {"top_k": 3}, {"top_k": 0, "top_p": 0.5}]
)
def test_logits_that_are_no_numbers_give_no_token(value: float, how: dict[str, Any]) -> None:
    logits = torch.cat((LOGITS, LOGITS, torch.full_like(LOGITS, -math.inf)))
    logits[1, 3] = value
    uniforms = torch.tensor([0.5] * 3, dtype=torch.float64)
    good, *bad = choose_tokens(logits, SamplingConfig(**how), uniforms).tolist()
    assert (good in range(5), bad) == (True, [NO_TOKEN] * 2)


def test_every_request_has_its_own_numbers_whatever_the_batch() -> None:
    device = torch.device("cpu")
    together = draw_uniforms(request_generators(0, 4, seed=5), device)
    later = draw_uniforms(request_generators(2, 2, seed=5), device)
    assert torch.equal(together[2:], later)
    assert len(set(together.tolist())) == 4


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"top_k": 5, "top_p": 0.9}, "--top-k 5 and --top-p 0.9 exclude each other"),
        ({"temperature": -1.0}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_k": 0, "top_p": 1.5}, "--top-p"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_sampling_out_of_range_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingConfig(**values)
