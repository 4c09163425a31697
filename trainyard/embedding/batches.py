"""Which texts are encoded together: by length, so that a batch has few groups of equal lengths.

Pure functions of lengths. Batches of a block do not depend on who computes them, or in what
order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.embedding.config import AROUND

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of some texts with [CLS] and [SEP], the longest text first, end to end."""

    tokens: Ints
    """(T,)"""
    lengths: Ints
    """(n,) descending."""
    order: Ints
    """(n,) the number of each text, as they were given."""

    @property
    def bounds(self) -> Ints:
        """(n + 1,) where each text begins in `tokens`, and the end of the last."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @property
    def positions(self) -> Ints:
        """(T,) of each token in its text."""
        return np.arange(len(self.tokens)) - np.repeat(self.bounds[:-1], self.lengths)


def framed_rows(
    ids: NDArray[Any], bounds: Ints, max_length: int, cls: int, sep: int, pad: int
) -> Rows:
    """Rows [CLS] ... [SEP] of at most `max_length` tokens; of a text without tokens
    [CLS] [PAD] [SEP], as in Megatron-LM.

    ids: of all texts, end to end. bounds: (n + 1,) where each begins, and the end of the last."""
    inside = np.minimum(np.diff(bounds), max_length - AROUND)
    lengths = np.maximum(inside, 1) + AROUND
    order = np.argsort(-lengths, kind="stable")
    inside, lengths, begins = inside[order], lengths[order], bounds[:-1][order]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    tokens = np.full(int(lengths.sum()), pad, np.int64)
    within = np.arange(int(inside.sum())) - np.repeat(np.cumsum(inside) - inside, inside)
    tokens[np.repeat(starts + 1, inside) + within] = ids[np.repeat(begins, inside) + within]
    tokens[starts], tokens[ends - 1] = cls, sep
    return Rows(tokens, lengths, order)


def cut_batches(lengths: Ints, max_tokens: int) -> list[range]:
    """Ranges of texts of at most `max_tokens` tokens together, at least one text each."""
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    batches, begin = [], 0
    while begin < len(lengths):
        end = int(np.searchsorted(bounds, bounds[begin] + max_tokens, "right")) - 1
        end = max(end, begin + 1)
        batches.append(range(begin, end))
        begin = end
    return batches
