"""From logits to tokens: penalties, temperature, top-k or else top-p, min-p, then a draw.

Functions of logits and of uniform numbers that the caller draws, so that the tokens of a text do
not depend on the rest of its batch. Every row has options of its own. b batch, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainyard.inference.config import SamplingConfig
from trainyard.inference.request import Completion
from trainyard.models.init import named_generator


def choose_tokens(
    logits: Tensor, sampling: SamplingConfig, uniforms: Tensor | None, num_tokens: int = 0
) -> Tensor:
    """One token a row, (b) int64, all rows by the same options.

    logits: (b, V). uniforms: (b) fp64 in [0, 1), needed unless the choice is greedy. num_tokens: of
    each output so far."""
    if sampling.greedy:
        return logits.argmax(dim=-1)
    assert uniforms is not None, "sampling needs a uniform number for each row"
    return draw(filtered_logits(logits, sampling, num_tokens), uniforms)


def filtered_logits(logits: Tensor, sampling: SamplingConfig, num_tokens: int = 0) -> Tensor:
    """Logits over the temperature, -inf for tokens that the options leave out; fp32 (b, V).

    num_tokens: of the output so far."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k > 0:
        logits = keep_top_k(logits, sampling.top_k)
    elif sampling.top_p > 0.0:
        logits = keep_top_p(logits, sampling.top_p_after(num_tokens))
    return keep_min_p(logits, sampling.min_p) if sampling.min_p > 0.0 else logits


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


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """-inf for tokens less likely than `min_p` times the likeliest one (arXiv:2407.01082)."""
    bound = logits.amax(dim=-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < bound, -math.inf)


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


class Sampler:
    """Chooses the next token of each of a list of completions, each by its own options."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = completions
        requests = [completion.request for completion in completions]
        self._generators = [
            request_generators(request.number, 1, request.sampling.seed)[0] for request in requests
        ]
        self._common: SamplingConfig | None = None
        """Options of all rows, if nothing else changes the logits of one."""
        samplings = {request.sampling for request in requests}
        if len(samplings) == 1 and not any(
            request.sampling.has_penalties or request.min_tokens or request.banned_after
            for request in requests
        ):
            self._common = samplings.pop()

    def choose(self, logits: Tensor) -> list[int]:
        """The token of each row of (b, V) logits; that of a finished completion means nothing."""
        counts = {len(one.tokens) for one in self.completions if not one.is_done}
        common = self._common
        if common is not None and (common.greedy or len(counts) == 1):
            uniforms = None if common.greedy else draw_uniforms(self._generators, logits.device)
            chosen = choose_tokens(logits, common, uniforms, max(counts))
        else:
            chosen = torch.stack([self._choose_one(i, row) for i, row in enumerate(logits)])
        tokens: list[int] = chosen.tolist()
        return tokens

    def _choose_one(self, row: int, logits: Tensor) -> Tensor:
        """() the token of one row."""
        completion, generator = self.completions[row], self._generators[row]
        if completion.is_done:
            return logits.new_zeros((), dtype=torch.int64)
        sampling = completion.request.sampling
        logits = allowed_logits(penalised(logits.float(), completion), completion)
        uniforms = None if sampling.greedy else draw_uniforms([generator], logits.device)
        chosen = choose_tokens(logits.unsqueeze(0), sampling, uniforms, len(completion.tokens))
        return chosen[0]


def penalised(logits: Tensor, completion: Completion) -> Tensor:
    """(V) logits after the penalties for tokens of prompt and output."""
    sampling = completion.request.sampling
    if not sampling.has_penalties:
        return logits
    device, size = logits.device, logits.shape[0]
    made = torch.tensor(completion.tokens, dtype=torch.int64, device=device)
    if sampling.repetition_penalty != 1.0:
        prompt = torch.tensor(list(completion.request.prompt), dtype=torch.int64, device=device)
        seen = torch.zeros(size, dtype=torch.bool, device=device)
        seen[torch.cat((prompt, made))] = True
        factor = sampling.repetition_penalty
        changed = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(seen, changed, logits)
    counts = torch.bincount(made, minlength=size)
    logits = logits - sampling.frequency_penalty * counts
    return logits - sampling.presence_penalty * (counts > 0)


def allowed_logits(logits: Tensor, completion: Completion) -> Tensor:
    """(V) logits, -inf for tokens that may not come next: an end too early, or after the last."""
    request = completion.request
    banned: list[int] = []
    if not completion.may_stop:
        banned += request.stop_ids
    if request.banned_after is not None:
        last = completion.tokens[-1] if completion.tokens else request.prompt[-1]
        banned += request.banned_after(last)
    if not banned:
        return logits
    out = logits.clone()
    out[torch.tensor(sorted(banned), device=logits.device)] = -math.inf
    return out
