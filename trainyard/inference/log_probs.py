"""Log-probabilities of tokens by the logits before them, without penalties and temperature.

In fp32 and in nats, as the loss of a training. s places, b batch, V vocabulary, n likeliest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.inference.request import NO_TOKEN, Completion, TopTokens

OnToken = Callable[[int, int], None]
"""Called with the row and the token as each is made."""

LOGITS_AT_ONCE = 2**25
"""fp32 numbers that scoring a prompt holds at a time: 128 MiB."""


class Scores(NamedTuple):
    """Of one token in each place, and of the likeliest ones there."""

    chosen: Tensor
    """(...) fp32."""
    top: Tensor
    """(..., n) fp32, descending."""
    top_ids: Tensor
    """(..., n) int64."""

    def top_of(self, *place: int) -> TopTokens:
        """The likeliest tokens of one place."""
        ids, values = self.top_ids[place].tolist(), self.top[place].tolist()
        return list(zip(ids, values, strict=True))


def score(logits: Tensor, tokens: Tensor, top_n: int) -> Scores:
    """logits: (..., V) before each of `tokens`, (...)."""
    log_probs = logits.float().log_softmax(dim=-1)
    top = log_probs.topk(min(top_n, logits.shape[-1]), dim=-1)
    return Scores(log_probs.gather(-1, tokens.unsqueeze(-1))[..., 0], top.values, top.indices)


def score_places(
    hidden: Tensor, tokens: Tensor, logits_of: Callable[[Tensor], Tensor], top_n: int, width: int
) -> Scores:
    """Scores of (s, b) tokens, each by the hidden states (s, b, h) in its place, a few places at a
    time. width: of the vocabulary."""
    size = max(LOGITS_AT_ONCE // (tokens.shape[1] * width), 1)
    parts = [
        score(logits_of(h), t, top_n)
        for h, t in zip(hidden.split(size), tokens.split(size), strict=True)
    ]
    return Scores(*(torch.cat(each) for each in zip(*parts, strict=True)))


def no_scores(count: int, batch: int, top_n: int, device: torch.device) -> Scores:
    """Zeros of the shapes that `score_places` gives, for ranks that receive them."""
    values = torch.zeros(count, batch, device=device)
    top = torch.zeros(count, batch, top_n, device=device)
    return Scores(values, top, top.long())


def prompt_scores(
    scores: Scores, row: int, begin: int, end: int
) -> tuple[list[float], list[TopTokens]]:
    """Those of places `begin` to `end` of a row: the tokens, and the likeliest ones there."""
    chosen: list[float] = scores.chosen[begin:end, row].tolist()
    places: Sequence[int] = range(begin, end) if scores.top.shape[-1] else ()
    return chosen, [scores.top_of(place, row) for place in places]


def take_tokens(
    logits: Tensor,
    chosen: Sequence[int],
    completions: Sequence[Completion],
    on_token: OnToken | None = None,
) -> None:
    """Append to every unfinished completion its token, with its score if it keeps scores; one
    without a token (NO_TOKEN) fails.

    logits: (b, V) that the tokens were chosen by. on_token: called with row and token for each."""
    wanted = [c.request.top_n for c in completions if c.request.log_probs and not c.is_done]
    scores = None
    if wanted:
        places = torch.tensor(chosen, device=logits.device).clamp(min=0)
        scores = score(logits, places, max(wanted))
    for row, (token, completion) in enumerate(zip(chosen, completions, strict=True)):
        if completion.is_done:
            continue
        if scores is not None and completion.request.log_probs and token != NO_TOKEN:
            completion.log_probs.append(float(scores.chosen[row]))
            if completion.request.top_n:
                completion.top.append(scores.top_of(row)[: completion.request.top_n])
        completion.append(token)
        if on_token is not None and token != NO_TOKEN:
            on_token(row, token)
