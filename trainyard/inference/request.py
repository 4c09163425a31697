"""One text to generate: what is asked for, and how far it is.

Knows nothing of batches or models, so that every engine may use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainyard.errors import DataError
from trainyard.inference.config import GREEDY, SamplingConfig

FinishReason = Literal["stop", "length"]
TopTokens = list[tuple[int, float]]
"""(token, log-probability), the likeliest first."""

NO_TOKEN = -1
"""Chosen where the logits are not numbers."""


class BrokenOutputError(DataError):
    """The logits of a text are NaN or infinite, so that it has no next token."""

    def __init__(self) -> None:
        super().__init__(
            "the model computes NaN or infinite logits for this text, so no token can be chosen; "
            "compute in bf16 or fp32 if that was fp16, else check the checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how it is continued."""

    prompt: Sequence[int]
    """Its tokens, at least one."""
    max_tokens: int
    """Most new tokens."""
    sampling: SamplingConfig = GREEDY
    number: int = 0
    """Of the request in the whole list: with the seed, it decides the random numbers."""
    min_tokens: int = 0
    """New tokens before it may end."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it; such a token is the last of the output."""
    is_stop: Callable[[Sequence[int]], bool] | None = None
    """Whether an output of these tokens ends here, as with stop words."""
    banned_after: Callable[[int], Sequence[int]] | None = None
    """Tokens that may not follow a token."""
    log_probs: bool = False
    """Whether to keep the log-probability of each new token."""
    prompt_log_probs: bool = False
    """Whether to compute those of the prompt, from its second token on."""
    top_n: int = 0
    """How many likeliest tokens to keep for each of these places."""

    def shortened(self, most: int) -> Request:
        """The same with at most this many new tokens."""
        return replace(
            self, max_tokens=min(self.max_tokens, most), min_tokens=min(self.min_tokens, most)
        )


@dataclass(slots=True)
class Completion:
    """The output of a request so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """New tokens, with the one that ended it."""
    log_probs: list[float] = field(default_factory=list)
    """Of each new token in nats, before penalties and temperature."""
    top: list[TopTokens] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    """Of the second token of the prompt, the third..."""
    prompt_top: list[TopTokens] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it runs, and for an output that failed."""
    is_broken: bool = False
    """Whether it ended because the logits were not numbers (`BrokenOutputError`)."""

    @property
    def is_done(self) -> bool:
        """Whether it takes no more tokens."""
        return self.finish_reason is not None or self.is_broken

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be one that ends it."""
        return len(self.tokens) >= self.request.min_tokens

    def append(self, token: int) -> None:
        """Take the next token, and end if it is the last, or if there is none."""
        assert not self.is_done, "a token behind the end of an output"
        if token == NO_TOKEN:
            self.is_broken = True
            return
        may_stop, request = self.may_stop, self.request
        self.tokens.append(token)
        by_text = request.is_stop is not None and request.is_stop(self.tokens)
        if may_stop and (token in request.stop_ids or by_text):
            self.finish_reason = "stop"
        elif len(self.tokens) >= request.max_tokens:
            self.finish_reason = "length"
