"""Generates for a batch of prompts that start together and stay until the last has finished.

Prompts may differ in length: shorter ones are padded at the end, and the padding is masked and
overwritten. The tokens of a prompt do not depend on the rest of its batch, up to rounding of the
matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.inference.config import GREEDY, SamplingConfig, check_length
from trainyard.inference.decoders import CachedDecoder, Decoder, Start
from trainyard.inference.log_probs import OnToken, prompt_scores, take_tokens
from trainyard.inference.request import BrokenOutputError, Completion, Request
from trainyard.inference.sampling import Sampler
from trainyard.models.costs.inference_memory import kv_numbers, state_bytes
from trainyard.models.gpt.model import GPTModel
from trainyard.parallel.device import check_memory
from trainyard.parallel.groups import ALONE, ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The outputs of a batch of prompts, and their times."""

    completions: list[Completion]
    step_seconds: list[float]
    """Time of each step by the caller's clock; the first includes the pass over the prompts."""
    cache_bytes: int
    """Memory of the cache: keys, values and states."""

    @property
    def outputs(self) -> list[list[int]]:
        """New tokens of each prompt, with the one that ended it."""
        return [completion.tokens for completion in self.completions]

    @property
    def stopped(self) -> list[bool]:
        """Whether a prompt ended with a token or text that ends it, and not by its length."""
        return [completion.finish_reason == "stop" for completion in self.completions]

    def seconds_per_token(self, index: int) -> list[float]:
        """Time that each new token of prompt `index` took."""
        return self.step_seconds[: len(self.completions[index].tokens)]


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: SamplingConfig = GREEDY,
    eod: int | None = None,
    vocab_size: int | None = None,
    first_request: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    groups: ProcessGroups = ALONE,
) -> GenerationResult:
    """Up to `max_new_tokens` after each prompt; a prompt ends early with `eod`.

    vocab_size: tokens that the tokenizer knows, so that padding of the vocabulary is never chosen.
    first_request: number of the first prompt in a longer list, which decides its random numbers.
    clock: tokens are read in each step, so it need not wait for the device. groups: the ranks that
    hold the model, all of which call this. The model should be in eval mode."""
    check_lengths(model, prompts, max_new_tokens)
    requests = [
        Request(
            prompt=prompt,
            max_tokens=max_new_tokens,
            sampling=sampling,
            number=first_request + index,
            stop_ids=frozenset() if eod is None else frozenset({eod}),
        )
        for index, prompt in enumerate(prompts)
    ]
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens
    decoder = CachedDecoder(model, len(prompts), capacity, groups, vocab_size)
    return run_requests(decoder, requests, clock=clock)


@torch.inference_mode()
def run_requests(
    decoder: Decoder,
    requests: Sequence[Request],
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_token: OnToken | None = None,
) -> GenerationResult:
    """Run a batch of requests, for which the decoder has room, to their ends.

    on_token: called for every new token of a row. Raises BrokenOutputError if a text breaks."""
    completions = [Completion(request) for request in requests]
    sampler, step_seconds = Sampler(completions), []
    started = clock()
    start = decoder.start([r.prompt for r in requests], top_n_of_prompts(requests))
    keep_prompt_scores(start, completions)
    is_ahead = (
        start.logits.is_cuda and sampler.is_uniform and not any(r.log_probs for r in requests)
    )
    steps = steps_ahead if is_ahead else steps_in_turn
    for logits, chosen in steps(decoder, sampler, start.logits):
        take_tokens(logits, chosen, completions, on_token)
        step_seconds.append(clock() - started)
        if any(completion.is_broken for completion in completions):
            raise BrokenOutputError
        if all(completion.is_done for completion in completions):
            break
        started = clock()
    return GenerationResult(
        completions=completions, step_seconds=step_seconds, cache_bytes=decoder.cache_bytes
    )


Steps = Iterator[tuple[Tensor, list[int]]]
"""(b, V) logits of each step, and the token of each row."""


def steps_in_turn(decoder: Decoder, sampler: Sampler, logits: Tensor) -> Steps:
    """Each step after the tokens of the last are known; for as long as it is asked."""
    while True:
        chosen = sampler.choose(logits)
        yield logits, chosen
        logits = decoder.step(torch.tensor(chosen, device=logits.device))


def steps_ahead(decoder: Decoder, sampler: Sampler, logits: Tensor) -> Steps:
    """Each step is queued before the tokens of the last are read, so that the device never waits
    for the host: one step too many where all texts end before their length. The logits are then
    those of the step behind."""
    last = max(completion.request.max_tokens for completion in sampler.completions)
    for number in range(last):
        chosen = sampler.choose_alike(logits, number)
        tokens = _Copy(chosen)
        if number + 1 < last:
            logits = decoder.step(chosen.clamp(min=0))  # NO_TOKEN has no embedding
        yield logits, tokens.read()


class _Copy:
    """A tensor on its way to the host."""

    def __init__(self, source: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = source
        if source.is_cuda:
            self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._copy.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[int]:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()
        values: list[int] = self._copy.tolist()
        return values


def top_n_of_prompts(requests: Sequence[Request]) -> int | None:
    """The most likeliest tokens that a prompt is scored with; None if none is."""
    return max((r.top_n for r in requests if r.prompt_log_probs), default=None)


def keep_prompt_scores(start: Start, completions: Sequence[Completion]) -> None:
    """Give every completion the scores of its prompt, if it asks for them."""
    if start.scores is None:
        return
    for row, completion in enumerate(completions):
        request = completion.request
        if request.prompt_log_probs:
            chosen, top = prompt_scores(start.scores, row, 0, len(request.prompt) - 1)
            completion.prompt_log_probs = chosen
            completion.prompt_top = [place[: request.top_n] for place in top if request.top_n]


def check_lengths(model: GPTModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts that are empty or that leave no room for the new tokens."""
    if not prompts:
        raise ConfigError("--prompts holds no prompt; give at least one")
    if max_new_tokens < 1:
        raise ConfigError(f"--num-tokens-to-generate must be at least 1, got {max_new_tokens}")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {index} has no tokens; give it at least one")
        what = f"prompt {index} of {len(prompt)} tokens"
        check_length(what, len(prompt), max_new_tokens, model.config.positions)


def check_room(
    model: GPTModel,
    num_prompts: int,
    length: int,
    max_new_tokens: int,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Refuse a batch of random prompts that exceeds the positions of the model or the memory of its
    device."""
    config = model.config
    check_length(f"--num-input-tokens {length}", length, max_new_tokens, config.positions)
    layers, each = range(config.num_layers), model.dtype.itemsize
    row = (
        kv_numbers(config, layers) * (length + max_new_tokens) * (kv_dtype or model.dtype).itemsize
    )
    row += state_bytes(config, layers, 1, each)
    check_memory(
        f"--inference-max-requests {num_prompts}: the cache of this many prompts of "
        f"{length + max_new_tokens} tokens takes",
        float(num_prompts * row),
        model.device,
        "generate for fewer at a time",
    )
