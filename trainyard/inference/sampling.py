"""From logits to a token: temperature, then top-k or else top-p, then a draw.

Pure functions of logits and of uniform numbers that the caller draws, so that the tokens of a
sequence do not depend on the rest of its batch. b batch, V vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainyard.inference.config import SamplingConfig
from trainyard.models.init import named_generator


def choose_tokens(logits: Tensor, sampling: SamplingConfig, uniforms: Tensor | None) -> Tensor:
    """One token a row, (b) int64.

    logits: (b, V). uniforms: (b) fp64 in [0, 1), needed unless the choice is greedy."""
    if sampling.greedy:
        return logits.argmax(dim=-1)
    assert uniforms is not None, "sampling needs a uniform number for each row"
    return draw(filtered_logits(logits, sampling), uniforms)


def filtered_logits(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Logits over the temperature, -inf where top-k or top-p leave a token out; fp32 (b, V)."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k > 0:
        return keep_top_k(logits, sampling.top_k)
    if sampling.top_p > 0.0:
        return keep_top_p(logits, sampling.top_p)
    return logits


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """-inf below the k-th largest of each row."""
    smallest_kept = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest_kept, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """-inf outside the smallest set of likeliest tokens whose probability exceeds `top_p`.

    The token that crosses the bound is in, so the likeliest token always is."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0.0
    out = before > top_p
    out[:, 0] = False
    return logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -math.inf)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at `uniforms`, (b) int64.

    fp64: over 100,000 tokens an fp32 sum would lose the rare ones."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1]
    targets = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)


def request_generators(first: int, count: int, seed: int) -> list[torch.Generator]:
    """A CPU generator for each request, by its number in the whole list and not in the batch."""
    return [named_generator(f"request {index}", seed) for index in range(first, first + count)]


def draw_uniforms(generators: list[torch.Generator], device: torch.device) -> Tensor:
    """The next number of every request's own sequence, (b) fp64 in [0, 1)."""
    drawn = [torch.rand((), dtype=torch.float64, generator=g) for g in generators]
    return torch.stack(drawn).to(device)
