"""From logits to tokens: penalties, temperature, top-k or else top-p, min-p, then a draw.

Functions of logits and of uniform numbers that the caller draws, so that the tokens of a text do
not depend on the rest of its batch. Every row has options of its own. b batch, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainyard.inference.config import SamplingConfig
from trainyard.inference.request import NO_TOKEN, Completion, Request
from trainyard.kernels.available import TRITON
from trainyard.models.init import named_generator


def choose_tokens(
    logits: Tensor, sampling: SamplingConfig, uniforms: Tensor | None, num_tokens: int = 0
) -> Tensor:
    """One token a row, (b) int64, all rows by the same options; NO_TOKEN where the logits are NaN
    or infinite.

    logits: (b, V). uniforms: (b) fp64 in [0, 1), needed unless the choice is greedy. num_tokens: of
    each output so far."""
    if sampling.greedy:
        return likeliest_tokens(logits)
    assert uniforms is not None, "sampling needs a uniform number for each row"
    return draw(filtered_logits(logits, sampling, num_tokens), uniforms)


def likeliest_tokens(logits: Tensor) -> Tensor:
    """Of each row of (b, V) logits, (b) int64; NO_TOKEN where one is NaN or infinite."""
    if TRITON and logits.is_cuda:
        from trainyard.kernels.greedy import greedy_kernel

        return greedy_kernel(logits, NO_TOKEN)
    likeliest = logits.argmax(dim=-1, keepdim=True)  # that of a NaN, if there is one
    is_number = logits.gather(-1, likeliest).isfinite()
    return likeliest.masked_fill(~is_number, NO_TOKEN).squeeze(-1)


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
    """Inverse of the cumulative distribution at `uniforms`, (b) int64; NO_TOKEN where there is no
    distribution: a logit is NaN or infinite, or all are -inf.

    fp64: over 100,000 tokens an fp32 sum would lose the rare ones."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1]
    targets = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)
    return chosen.masked_fill(total.isnan(), NO_TOKEN)


def request_generators(first: int, count: int, seed: int) -> list[torch.Generator]:
    """A CPU generator for each request, by its number in the whole list and not in the batch."""
    return [named_generator(f"request {index}", seed) for index in range(first, first + count)]


def generator_of(request: Request) -> torch.Generator:
    """The random numbers of a request, from its first token on."""
    return request_generators(request.number, 1, request.sampling.seed)[0]


def draw_uniforms(generators: Sequence[torch.Generator], device: torch.device) -> Tensor:
    """The next number of every request's own sequence, (b) fp64 in [0, 1)."""
    drawn = [torch.rand((), dtype=torch.float64, generator=g) for g in generators]
    return torch.stack(drawn).to(device)


class Sampler:
    """Chooses the next token of each of a list of completions, each by its own options."""

    def __init__(
        self,
        completions: Sequence[Completion],
        generators: Sequence[torch.Generator] | None = None,
    ) -> None:
        """generators: of each completion, as `generator_of` makes them for its first token."""
        self.completions = completions
        if generators is None:
            generators = [generator_of(completion.request) for completion in completions]
        self._generators = generators

    def choose(self, logits: Tensor) -> list[int]:
        """The token of each row of (b, V) logits; that of a finished completion means nothing."""
        groups, alone = self._groups()
        if len(groups) == 1 and not alone:
            (rows,) = groups.values()
            if len(rows) == len(self.completions):
                whole: list[int] = self._choose_group(rows, logits).tolist()
                return whole
        chosen = logits.new_zeros(len(self.completions), dtype=torch.int64)
        for rows in groups.values():
            index = torch.tensor(rows, device=logits.device)
            chosen[index] = self._choose_group(rows, logits[index])
        for row in alone:
            chosen[row] = self._choose_one(row, logits[row])
        tokens: list[int] = chosen.tolist()
        return tokens

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same options, and nothing but the logits decides."""
        requests = [completion.request for completion in self.completions]
        return len({request.sampling for request in requests}) == 1 and not any(
            request.sampling.has_penalties or request.min_tokens or request.banned_after
            for request in requests
        )

    def choose_alike(self, logits: Tensor, num_tokens: int) -> Tensor:
        """(b) int64 on the device of (b, V) logits, if `is_uniform`; num_tokens: of each output so
        far."""
        sampling, uniforms = self.completions[0].request.sampling, None
        if not sampling.greedy:
            uniforms = draw_uniforms(self._generators, logits.device)
        return choose_tokens(logits, sampling, uniforms, num_tokens)

    def _groups(self) -> tuple[dict[tuple[SamplingConfig, int], list[int]], list[int]]:
        """Rows that are chosen together, by their options and what of them has changed by now, and
        those whose logits depend on their own tokens."""
        groups: dict[tuple[SamplingConfig, int], list[int]] = {}
        alone: list[int] = []
        for row, completion in enumerate(self.completions):
            request = completion.request
            sampling = request.sampling
            if completion.is_done:
                continue
            if sampling.has_penalties or request.banned_after or not completion.may_stop:
                alone.append(row)
            else:
                so_far = len(completion.tokens) if sampling.top_p_decay else 0
                groups.setdefault((sampling, so_far), []).append(row)
        return groups, alone

    def _choose_group(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        """(r) tokens of rows with the same options, of their logits (r, V)."""
        completion = self.completions[rows[0]]
        sampling, uniforms = completion.request.sampling, None
        if not sampling.greedy:
            uniforms = draw_uniforms([self._generators[row] for row in rows], logits.device)
        return choose_tokens(logits, sampling, uniforms, len(completion.tokens))

    def _choose_one(self, row: int, logits: Tensor) -> Tensor:
        """() the token of one row."""
        completion, generator = self.completions[row], self._generators[row]
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
