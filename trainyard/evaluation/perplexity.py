"""Perplexity of one long text, in overlapping windows.

Target t is token t, 1 <= t < number of tokens. The first window scores all its targets. Each later
one moves on by `stride` and scores its last `stride` targets only. So every target is scored once,
and behind the first window it has at least window - stride tokens of context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.errors import DataError
from trainyard.models.gpt.model import GPTModel

LARGEST_EXPONENT = 20.0
"""Losses above it are reported as exp(20), as upstream does."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens start .. start + num_targets, of which the last `num_scored` targets count."""

    start: int
    num_targets: int
    num_scored: int


def windows(num_tokens: int, length: int, stride: int) -> list[Window]:
    """The windows over a text of `num_tokens`, each of at most `length` targets."""
    num_targets = num_tokens - 1
    result = [Window(0, min(length, num_targets), min(length, num_targets))]
    scored = result[0].num_scored
    while scored < num_targets:
        start = result[-1].start + stride
        end = min(start + length, num_targets)
        result.append(Window(start, end - start, end - scored))
        scored = end
    return result


@torch.inference_mode()
def total_loss(
    model: GPTModel,
    tokens: Sequence[int],
    *,
    length: int,
    stride: int,
    batch_size: int,
    on_targets: Callable[[int], None] = lambda count: None,
) -> float:
    """Sum of the losses of all targets in nats; `on_targets` gets the number of newly scored ones.

    The sum is kept in fp64: a million targets in fp32 would lose digits."""
    data = torch.tensor(tokens, dtype=torch.int64, device=model.device)
    cut = windows(len(tokens), length, stride)
    total = 0.0
    for first in range(0, len(cut), batch_size):
        batch = cut[first : first + batch_size]
        total += _batch_loss(model, data, batch)
        on_targets(sum(window.num_scored for window in batch))
    return total


def _batch_loss(model: GPTModel, data: Tensor, batch: Sequence[Window]) -> float:
    widest = max(window.num_targets for window in batch)
    tokens = torch.zeros(len(batch), widest, dtype=torch.int64, device=data.device)
    for row, window in enumerate(batch):
        tokens[row, : window.num_targets] = data[window.start : window.start + window.num_targets]
    hidden = model.hidden_states(tokens)  # (s, b, h)
    scored, targets = [], []
    for row, window in enumerate(batch):
        end = window.start + window.num_targets
        scored.append(hidden[window.num_targets - window.num_scored : window.num_targets, row])
        targets.append(data[end - window.num_scored + 1 : end + 1])
    logits = model.logits(torch.cat(scored)).float()  # scored targets only: (targets, V)
    losses = functional.cross_entropy(logits, torch.cat(targets), reduction="none")
    return losses.double().sum().item()


def summary(loss_sum: float, num_tokens: int, num_words: int, num_bytes: int) -> dict[str, Any]:
    """The reported numbers: per token, per word of the file (adjusted), per byte of the text."""
    num_targets = num_tokens - 1
    loss = loss_sum / num_targets
    token_ratio = num_targets / (num_words - 1)
    return {
        "avg_loss": loss,
        "ppl": math.exp(min(LARGEST_EXPONENT, loss)),
        "adjusted_ppl": math.exp(min(LARGEST_EXPONENT, loss * token_ratio)),
        "token_ratio": token_ratio,
        "bits_per_byte": loss_sum / math.log(2.0) / num_bytes,
        "num_tokens": num_tokens,
        "num_original_tokens": num_words,
        "num_bytes": num_bytes,
    }


def check_text(text: str, num_tokens: int, name: str) -> int:
    """Words of a file before detokenising; DataError when there are too few to measure."""
    num_words = len(text.strip().split(" "))
    if num_words < 2 or num_tokens < 2:
        raise DataError(
            f"{name}: {num_words} words and {num_tokens} tokens; perplexity needs 2 of each"
        )
    return num_words
