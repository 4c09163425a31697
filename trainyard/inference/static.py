"""Generates for a batch of prompts that start together and stay until the last has finished.

Prompts may differ in length: shorter ones are padded at the end, and the padding is masked and
overwritten. The tokens of a prompt do not depend on the rest of its batch, up to rounding of the
matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.errors import ConfigError
from trainyard.inference.config import GREEDY, SamplingConfig, check_length
from trainyard.inference.kv_cache import StaticKVCache
from trainyard.inference.sampling import choose_tokens, draw_uniforms, request_generators
from trainyard.models.gpt.model import GPTModel
from trainyard.parallel.device import check_memory

PADDING = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The generated tokens of a batch of prompts, and their times."""

    outputs: list[list[int]]
    """New tokens of each prompt, with the end-of-document token if it was generated."""
    stopped: list[bool]
    """Whether a prompt ended with the end-of-document token and not by its length."""
    step_seconds: list[float]
    """Time of each step by the caller's clock; the first includes the pass over the prompts."""
    cache_bytes: int
    """Memory of the key and value cache."""

    def seconds_per_token(self, index: int) -> list[float]:
        """Time that each new token of prompt `index` took."""
        return self.step_seconds[: len(self.outputs[index])]


@torch.inference_mode()
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
) -> GenerationResult:
    """Up to `max_new_tokens` after each prompt; a prompt ends early with `eod`.

    vocab_size: tokens that the tokenizer knows, so that padding of the vocabulary is never chosen.
    first_request: number of the first prompt in a longer list, which decides its random numbers.
    clock: on an accelerator, one that waits for the device. The model should be in eval mode."""
    check_lengths(model, prompts, max_new_tokens)
    device = model.device
    lengths = [len(prompt) for prompt in prompts]
    cache = _new_cache(model, len(prompts), max(lengths) + max_new_tokens)
    generators = request_generators(first_request, len(prompts), sampling.seed)
    tokens, counts = _padded(prompts, device), lengths
    outputs: list[list[int]] = [[] for _ in prompts]
    done, step_seconds = [False] * len(prompts), []
    for _ in range(max_new_tokens):
        started = clock()
        logits = _next_logits(model, tokens, counts, cache, vocab_size)
        uniforms = None if sampling.greedy else draw_uniforms(generators, device)
        tokens = choose_tokens(logits, sampling, uniforms).unsqueeze(1)
        _collect(tokens[:, 0].tolist(), outputs, done, eod)
        step_seconds.append(clock() - started)
        counts = [1] * len(prompts)
        if all(done):
            break
    return GenerationResult(
        outputs=outputs, stopped=done, step_seconds=step_seconds, cache_bytes=cache.size_bytes
    )


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


def check_room(model: GPTModel, num_prompts: int, length: int, max_new_tokens: int) -> None:
    """Refuse a batch of random prompts that exceeds the positions of the model or the memory of its
    device."""
    config = model.config
    check_length(f"--num-input-tokens {length}", length, max_new_tokens, config.positions)
    of_token = sum(heads * channels for heads, channels in config.cached_heads)
    row = config.num_layers * of_token * (length + max_new_tokens)
    check_memory(
        f"--inference-max-requests {num_prompts}: the keys and values of this many prompts of "
        f"{length + max_new_tokens} tokens take",
        float(num_prompts * row * model.dtype.itemsize),
        model.device,
        "generate for fewer at a time",
    )


def _new_cache(model: GPTModel, batch_size: int, capacity: int) -> StaticKVCache:
    return StaticKVCache(model.config, batch_size, capacity, dtype=model.dtype, device=model.device)


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(len(prompt) for prompt in prompts)
    rows = [[*prompt, *[PADDING] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _next_logits(
    model: GPTModel,
    tokens: Tensor,
    counts: list[int],
    cache: StaticKVCache,
    vocab_size: int | None,
) -> Tensor:
    """Logits (b, V) after the last real token of each row, and the cache advanced by `counts`."""
    hidden = model.hidden_states(tokens, kv_cache=cache)  # (s, b, h)
    cache.advance(counts)
    rows = torch.arange(len(counts), device=hidden.device)
    last = hidden[torch.tensor(counts, device=hidden.device) - 1, rows]
    return model.logits(last)[:, :vocab_size]


def _collect(
    chosen: list[int], outputs: list[list[int]], done: list[bool], eod: int | None
) -> None:
    for index, token in enumerate(chosen):
        if done[index]:
            continue
        outputs[index].append(token)
        done[index] = token == eod
