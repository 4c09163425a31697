"""Log-likelihoods of tokens under a model that may be spread over ranks.

Everything that is not generated is scored here: windows of a text, last words, choices. A request
is a row of tokens of which the last few are scored. Rows of one batch are padded at their ends,
which no token before them sees, so that a score does not depend on the rest of its batch.

b rows of a batch, s tokens of the longest, h hidden, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.attention.masks import CAUSAL
from trainyard.models.gpt.model import GPTModel
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.parallel.pipeline.forward_links import ForwardLinks


class Request(NamedTuple):
    """Tokens of which the last `num_scored` are scored, each given all tokens before it."""

    tokens: Sequence[int]
    num_scored: int


class Score(NamedTuple):
    """The score of a request."""

    loss: float
    """Sum of the negative log-likelihoods of the scored tokens in nats."""
    predicted: tuple[int, ...]
    """The likeliest token at the place of each scored one."""
    losses: tuple[float, ...]
    """The negative log-likelihood of each."""


def is_greedy(request: Request, score: Score) -> bool:
    """Whether every scored token was the likeliest."""
    return tuple(request.tokens[-request.num_scored :]) == score.predicted


class Scorer:
    """Scores requests on the ranks that hold one copy of the model. All of them call `score` with
    the same requests."""

    def __init__(self, model: GPTModel, groups: ProcessGroups = ALONE, batch_size: int = 4) -> None:
        """model: the part of this rank, in evaluation mode, fp32. batch_size: rows at a time."""
        self.model, self.groups, self._batch_size = model, groups, batch_size
        self._links = ForwardLinks(groups)

    @torch.inference_mode()
    def score(self, requests: Sequence[Request]) -> list[Score]:
        """The score of each request, in order, on all ranks.

        Rows of about one length are computed together. Each needs a token before the first scored
        one."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
        found: dict[int, Score] = {}
        for first in range(0, len(order), self._batch_size):
            chosen = order[first : first + self._batch_size]
            scores = self._score_batch([requests[index] for index in chosen])
            found.update(zip(chosen, scores, strict=False))
        self._links.settle()
        shared = self._links.from_last_stage([found[index] for index in sorted(found)])
        assert len(shared) == len(requests), (len(shared), len(requests))
        return shared

    def _score_batch(self, batch: Sequence[Request]) -> list[Score]:
        """The scores on the last pipeline stage; nothing on the others."""
        model, stage = self.model, self.model.pipeline_stage
        lengths = [len(request.tokens) - 1 for request in batch]  # of the inputs
        assert all(0 < r.num_scored <= n for r, n in zip(batch, lengths, strict=True)), batch
        shape = (max(lengths), len(batch), model.config.hidden_size)
        device = model.device
        hidden = None if stage.has_embedding else self._links.receive(shape, model.dtype, device)
        tokens = self._padded(batch, max(lengths)) if stage.has_embedding else None
        out = model.run_layers(model.decoder, hidden, tokens, CAUSAL)  # (s, b, h)
        if not stage.has_output:
            self._links.send(out)
            return []
        counts = [request.num_scored for request in batch]
        scored = [out[n - k : n, i] for i, (n, k) in enumerate(zip(lengths, counts, strict=True))]
        logits = model.logits(torch.cat(scored)).float()  # of the scored places alone: (t, V)
        labels = [token for r in batch for token in r.tokens[-r.num_scored :]]
        targets = torch.tensor(labels, dtype=torch.int64, device=device)
        losses = functional.cross_entropy(logits, targets, reduction="none").double()
        # fp64: a window of a thousand targets in fp32 would lose digits.
        sums = [part.sum().item() for part in losses.split(counts)]
        likeliest = [tuple(part.tolist()) for part in logits.argmax(dim=-1).split(counts)]
        each = [tuple(part.tolist()) for part in losses.split(counts)]
        return [Score(*of_one) for of_one in zip(sums, likeliest, each, strict=True)]

    def _padded(self, batch: Sequence[Request], longest: int) -> Tensor:
        rows = [[*r.tokens[:-1], *[0] * (longest + 1 - len(r.tokens))] for r in batch]
        return torch.tensor(rows, dtype=torch.int64, device=self.model.device)
